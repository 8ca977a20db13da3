"""Inputs of one block after another, in the float model and in the one that is being quantized."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lampq.data import Samples
from lampq.hooks import arguments_of

# arrays above this size live in a temporary file
IN_MEMORY = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of a block beside the tensor of tokens."""

    rest: tuple[Any, ...]
    named: Mapping[str, Any]


def room(rows: int, like: Tensor, limit: int = IN_MEMORY) -> Tensor:
    """An array of so many rows like those of a tensor, in memory or in a temporary file."""
    shape = (rows, *like.shape[1:])
    if rows * like[0].numel() * like.element_size() <= limit:
        return torch.empty(shape, dtype=like.dtype)
    kind = np.dtype(str(like.dtype).removeprefix("torch."))
    with tempfile.TemporaryFile() as file:  # the mapping outlives the handle
        return torch.from_numpy(np.memmap(file, kind, "w+", shape=shape))


def input_of(model: nn.Module, block: str, images: Tensor) -> tuple[Tensor, Call]:
    """What the model gives to a block."""
    arguments, named = arguments_of(model, block, images)
    return arguments[0], Call(tuple(arguments[1:]), named)


class Feed:
    """Inputs of a block in both models, and the output of the float one, for all samples.

    ``advance`` goes to the next block. Where the output of a block is the input of the next, as
    inside a stage, nothing before it is run again.
    """

    def __init__(
        self, exact: nn.Module, model: nn.Module, blocks: tuple[str, ...], samples: Samples
    ) -> None:
        self.exact, self.model, self.blocks, self.samples = exact, model, blocks, samples
        self.number = 0
        self.batch = 16
        self.float_inputs = self._from_images(exact)
        self.inputs = self._from_images(model)
        self.call = input_of(exact, blocks[0], samples.inputs(slice(0, 1)))[1]
        self.targets = self._through(exact, self.float_inputs)

    @property
    def block(self) -> nn.Module:
        """The current block of the model that is being quantized."""
        return self.model.get_submodule(self.blocks[self.number])

    def _from_images(self, model: nn.Module) -> Tensor:
        gathered: Tensor | None = None
        for start in range(0, len(self.samples), self.batch):
            part = slice(start, start + self.batch)
            rows, _ = input_of(model, self.blocks[self.number], self.samples.inputs(part))
            if gathered is None:
                gathered = room(len(self.samples), rows)
            gathered[part] = rows
        assert gathered is not None, "samples are never empty"
        return gathered

    @torch.no_grad()
    def _through(self, model: nn.Module, inputs: Tensor) -> Tensor:
        block = model.get_submodule(self.blocks[self.number])
        gathered: Tensor | None = None
        for start in range(0, len(inputs), self.batch):
            part = slice(start, start + self.batch)
            rows = block(inputs[part], *self.call.rest, **self.call.named)
            if gathered is None:
                gathered = room(len(inputs), rows)
            gathered[part] = rows
        assert gathered is not None, "samples are never empty"
        return gathered

    def advance(self) -> None:
        """Go to the next block."""
        outputs = self._through(self.model, self.inputs)
        self.number += 1
        first = self.samples.inputs(slice(0, self.batch))
        rows, self.call = input_of(self.exact, self.blocks[self.number], first)
        ahead = self.targets[: self.batch]
        if rows.shape == ahead.shape and torch.allclose(rows, ahead, rtol=1e-4, atol=1e-4):
            self.float_inputs, self.inputs = self.targets, outputs
        else:
            self.float_inputs = self._from_images(self.exact)
            self.inputs = self._from_images(self.model)
        self.targets = self._through(self.exact, self.float_inputs)
