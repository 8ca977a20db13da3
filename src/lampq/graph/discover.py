"""Find the quantizable sites of a model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lampq.errors import GraphError
from lampq.graph.attention import MatMul
from lampq.graph.blocks import Sum
from lampq.graph.families import TIMM, RolePattern
from lampq.quant.fold import NormFold, fold_norm_
from lampq.types import SEARCHED_ROLES, LayerRole, LayerSpec, MatmulSpec, ModelGraph, SumSpec


def _contents(model: nn.Module) -> str:
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    shown = ", ".join(linear[:6]) + (", ..." if len(linear) > 6 else "")
    return f"{type(model).__name__} with {len(linear)} linear and convolution layers ({shown})"


def _foldable(model: nn.Module, name: str) -> bool:
    try:
        norm = model.get_submodule(name)
    except AttributeError:
        return False
    return isinstance(norm, nn.LayerNorm) and norm.elementwise_affine and norm.bias is not None


def _is_patch_embedding(module: nn.Module) -> bool:
    return (
        isinstance(module, nn.Conv2d)
        and module.groups == 1
        and tuple(module.kernel_size) == tuple(module.stride)
        and module.padding in ((0, 0), "valid")
    )


def _prefix_tokens(model: nn.Module) -> int:
    """How many tokens of a model's blocks come before the patches, as timm's models say."""
    found = getattr(model, "num_prefix_tokens", 0)
    return found if isinstance(found, int) else 0


def discover(model: nn.Module, patterns: tuple[RolePattern, ...] = TIMM) -> ModelGraph:
    """The layers, norms, matmuls and sums of a model in its explicit form.

    What matches inside another block (the small MLP of a position bias) is left in float.
    Raises GraphError, saying what the model has, if none of the searched roles is found.
    """
    layers: list[LayerSpec] = []
    matmuls: list[MatmulSpec] = []
    sums: list[SumSpec] = []
    blocks: dict[str, int] = {}
    prefix = _prefix_tokens(model)
    for name, module in model.named_modules():
        for pattern in patterns:
            block = pattern.match(name)
            is_layer = isinstance(module, nn.Linear) or _is_patch_embedding(module)
            if block is None or not is_layer:
                continue
            if pattern.role in SEARCHED_ROLES and block:
                blocks.setdefault(block, len(blocks))
            norm = f"{block}.{pattern.norm}".lstrip(".") if pattern.norm else None
            layers.append(
                LayerSpec(
                    name=name,
                    role=pattern.role,
                    block=blocks.get(block, -1) if pattern.role in SEARCHED_ROLES else -1,
                    n_params=module.weight.numel(),
                    norm=norm if norm is not None and _foldable(model, norm) else None,
                    prefix=prefix if pattern.role in SEARCHED_ROLES else 0,
                )
            )
        if isinstance(module, Sum):
            block = next((b for b in reversed(blocks) if name.startswith(f"{b}.")), "")
            sums.append(SumSpec(name, module.role, blocks.get(block, -1)))
        if isinstance(module, MatMul):
            block = next((b for b in reversed(blocks) if name.startswith(f"{b}.")), "")
            kind = "qk" if name.endswith("qk") else "av"
            number = blocks.get(block, -1)
            matmuls.append(MatmulSpec(name, kind, number, prefix))  # type: ignore[arg-type]
    nested = {a for a in blocks if any(a.startswith(f"{b}.") for b in blocks)}
    if nested:
        inside = {blocks[name] for name in nested}
        outer = {name: i for i, name in enumerate(b for b in blocks if b not in nested)}
        moved = {blocks[name]: i for name, i in outer.items()}
        kept = [layer for layer in layers if layer.block not in inside]
        layers = [replace(layer, block=moved.get(layer.block, -1)) for layer in kept]
        matmuls = [replace(site, block=moved.get(site.block, -1)) for site in matmuls]
        sums = [replace(site, block=moved.get(site.block, -1)) for site in sums]
        blocks = outer
    if not any(layer.role in SEARCHED_ROLES for layer in layers):
        wanted = ", ".join(p.pattern for p in patterns if p.role in SEARCHED_ROLES)
        raise GraphError(
            f"no layer matches the role patterns ({wanted}); the model is a {_contents(model)}"
        )
    return ModelGraph(tuple(layers), tuple(matmuls), tuple(blocks), tuple(sums))


def missing_roles(graph: ModelGraph) -> tuple[LayerRole, ...]:
    """The searched roles no layer of the graph plays."""
    found = {layer.role for layer in graph.layers}
    return tuple(role for role in SEARCHED_ROLES if role not in found)


@torch.no_grad()
def verify_norms(
    model: nn.Module,
    graph: ModelGraph,
    example: Any,
    outputs: Callable[[nn.Module, Any], Tensor] = lambda model, images: model(images),
) -> ModelGraph:
    """The graph without the norms that feed something else than their layer.

    Each norm is folded into its layer with random factors; a norm that has another consumer,
    or whose output is padded on the way, changes the model's output and is dropped.
    ``outputs``: what a model makes of the example images.
    """
    candidates = [layer for layer in graph.layers if layer.norm is not None]
    expected = outputs(model, example)

    def unchanged(layers: list[LayerSpec]) -> bool:
        folded = copy.deepcopy(model)
        generator = torch.Generator().manual_seed(0)
        for layer in layers:
            _fold_randomly_(folded, layer, generator)
        got = outputs(folded, example)
        return bool(torch.allclose(got, expected, rtol=1e-3, atol=1e-3 * float(expected.std())))

    if unchanged(candidates):
        return graph
    kept = {layer.name for layer in candidates if unchanged([layer])}
    return replace(
        graph,
        layers=tuple(
            layer if layer.name in kept else replace(layer, norm=None) for layer in graph.layers
        ),
    )


@torch.no_grad()
def verify_prefix(
    model: nn.Module,
    graph: ModelGraph,
    example: Any,
    outputs: Callable[[nn.Module, Any], Tensor] = lambda model, images: model(images),
) -> ModelGraph:
    """The graph without a prefix if a layer sees something else than a row of tokens an image."""
    layers = [layer for layer in graph.layers if layer.prefix]
    if not layers:
        return graph
    shapes: list[torch.Size] = []
    handles = [
        model.get_submodule(layer.name).register_forward_pre_hook(
            lambda _module, given: shapes.append(given[0].shape)
        )
        for layer in layers
    ]
    try:
        outputs(model, example)
    finally:
        for handle in handles:
            handle.remove()
    rows = {(shape[0], shape[1]) for shape in shapes if len(shape) == 3}
    same = len(rows) == 1 and all(len(shape) == 3 for shape in shapes)
    if same and rows.pop()[1] > layers[0].prefix:
        return graph
    return replace(
        graph,
        layers=tuple(replace(layer, prefix=0) for layer in graph.layers),
        matmuls=tuple(replace(site, prefix=0) for site in graph.matmuls),
    )


def _fold_randomly_(model: nn.Module, layer: LayerSpec, generator: torch.Generator) -> None:
    assert layer.norm is not None, "only candidates with a norm are folded"
    norm, linear = model.get_submodule(layer.norm), model.get_submodule(layer.name)
    assert isinstance(norm, nn.LayerNorm), "discovery names LayerNorms only"
    assert isinstance(linear, nn.Linear), "only linear layers have a norm"
    channels = linear.in_features
    draw = torch.rand(2, channels, generator=generator).to(linear.weight)
    fold = NormFold(ratio=draw[0] + 0.5, shift=draw[1] - 0.5)
    own = linear.bias if linear.bias is not None else linear.weight.new_zeros(linear.out_features)
    weight, bias = fold.of_linear(linear.weight, own)
    linear.weight, linear.bias = nn.Parameter(weight), nn.Parameter(bias)
    fold_norm_(norm, fold)
