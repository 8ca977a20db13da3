"""What the modules of a model are given and give, while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def hooked(
    names: list[str], attach: Callable[[str], torch.utils.hooks.RemovableHandle]
) -> Iterator[None]:
    """Hooks on the named modules, removed at the end."""
    handles = [attach(name) for name in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def recording(model: nn.Module, names: list[str]) -> Iterator[dict[str, tuple[Tensor, ...]]]:
    """Inputs of the named modules in the last forward pass, while the context lasts."""
    seen: dict[str, tuple[Tensor, ...]] = {}

    def attach(name: str) -> torch.utils.hooks.RemovableHandle:
        def keep(_module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            seen[name] = tuple(arguments)

        return model.get_submodule(name).register_forward_pre_hook(keep)

    with hooked(names, attach):
        yield seen


@contextmanager
def recording_outputs(model: nn.Module, names: list[str]) -> Iterator[dict[str, Tensor]]:
    """Outputs of the named modules in the last forward pass, of those that give a tensor."""
    seen: dict[str, Tensor] = {}

    def attach(name: str) -> torch.utils.hooks.RemovableHandle:
        def keep(_module: nn.Module, _arguments: tuple[Tensor, ...], output: Any) -> None:
            if isinstance(output, Tensor):
                seen[name] = output

        return model.get_submodule(name).register_forward_hook(keep)

    with hooked(names, attach):
        yield seen


@contextmanager
def recording_gradients(model: nn.Module, names: list[str]) -> Iterator[dict[str, Tensor]]:
    """Gradients at the outputs of the named modules in the last backward pass."""
    seen: dict[str, Tensor] = {}

    def attach(name: str) -> torch.utils.hooks.RemovableHandle:
        def keep(_module: nn.Module, _arguments: tuple[Tensor, ...], output: Any) -> None:
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(  # type: ignore[no-untyped-call]
                    lambda gradient: seen.__setitem__(name, gradient)
                )

        return model.get_submodule(name).register_forward_hook(keep)

    with hooked(names, attach):
        yield seen


@dataclass(slots=True)
class Call:
    """One call of a site in a pass: its operands, and what is kept of its output's gradient."""

    operands: tuple[Tensor, ...]
    gradient: Tensor | None = None


@contextmanager
def recording_calls(
    model: nn.Module,
    names: list[str],
    kept: Callable[[str, Tensor], Tensor | None] = lambda _name, gradient: gradient,
) -> Iterator[dict[str, list[Call]]]:
    """All calls of the named modules, while the context lasts; the user empties the lists.

    ``kept``: what is kept of the gradient at the output of a module, by its name.
    """
    calls: dict[str, list[Call]] = {}

    def attach(name: str) -> torch.utils.hooks.RemovableHandle:
        def keep(_module: nn.Module, operands: tuple[Tensor, ...], output: Any) -> None:
            call = Call(tuple(operand.detach() for operand in operands))
            calls.setdefault(name, []).append(call)
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(  # type: ignore[no-untyped-call]
                    lambda gradient: setattr(call, "gradient", kept(name, gradient))
                )

        return model.get_submodule(name).register_forward_hook(keep)

    with hooked(names, attach):
        yield calls


class ReachedError(Exception):
    """Ends a forward pass at the wanted module."""


@torch.no_grad()
def arguments_of(
    model: nn.Module, name: str, inputs: Tensor, *rest: Any, **named: Any
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """What the model gives to one of its modules, without running the rest of it."""
    found: list[tuple[tuple[Any, ...], Mapping[str, Any]]] = []

    def stop(_module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        found.append((arguments, keywords))
        raise ReachedError

    handle = model.get_submodule(name).register_forward_pre_hook(stop, with_kwargs=True)
    try:
        model(inputs, *rest, **named)
    except ReachedError:
        pass
    finally:
        handle.remove()
    return found[0]
