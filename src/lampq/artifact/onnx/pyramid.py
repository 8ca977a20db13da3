"""The backbone and the feature pyramid of a detector as an ONNX graph, for images of one size."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from lampq.artifact.onnx.builder import BATCH, GraphBuilder
from lampq.artifact.onnx.parts import Size, norm
from lampq.artifact.onnx.sites import convolution
from lampq.artifact.onnx.swin import swin_stages
from lampq.errors import ExportError


def emit_pyramid(g: GraphBuilder, model: Any, size: Size) -> None:
    """A ``SwinFPN`` in explicit form: normalised images to the levels of its pyramid."""
    channels = int(model.patch_embed.proj.weight.shape[1])
    stages = swin_stages(g, model, (channels, *size))
    laterals = []
    for i, (x, grid) in enumerate(stages):
        x = norm(g, model.norms[i], f"norms.{i}", x)
        maps = g.node("Transpose", x, name=f"norms.{i}/maps", perm=[0, 3, 1, 2])
        inner = model.fpn.inner_blocks[i][0]
        laterals.append((convolution(g, inner, f"fpn.inner_blocks.{i}.0", maps, grid), grid))
    levels: list[tuple[str, Size]] = []
    above: tuple[str, Size] | None = None
    for i in reversed(range(len(laterals))):
        x, grid = laterals[i]
        if above is not None:
            larger = _stretched(g, above[0], above[1], grid, f"fpn/{i}")
            x = g.node("Add", x, larger, name=f"fpn/{i}/total")
        above = (x, grid)
        layer = model.fpn.layer_blocks[i][0]
        levels.insert(0, (convolution(g, layer, f"fpn.layer_blocks.{i}.0", x, grid), grid))
    last, grid = levels[-1]
    half = ((grid[0] + 1) // 2, (grid[1] + 1) // 2)
    shape = {"kernel_shape": [1, 1], "strides": [2, 2]}
    pooled = g.node("MaxPool", last, name="fpn/pool", **shape)
    width = int(model.out_channels)
    named = [(f"level_{i}", value, at) for i, (value, at) in enumerate(levels)]
    for name, value, at in [*named, ("level_pool", pooled, half)]:
        # the last level is pooled too: an output must have a node of its own
        copied = g.node("Identity", value, name=f"{name}/copied")
        g.output(copied, name, (BATCH, width, *at))


def _stretched(g: GraphBuilder, x: str, old: Size, new: Size, name: str) -> str:
    """Maps of the next level, each place repeated as torch repeats the nearest one."""
    for axis, (had, wanted) in enumerate(zip(old, new, strict=True), start=2):
        places = torch.arange(had, dtype=torch.float32)[None, None]
        index = F.interpolate(places, size=wanted, mode="nearest")[0, 0].long()
        x = g.node("Gather", x, g.shared(index.numpy()), name=f"{name}/nearest{axis}", axis=axis)
    return x


def check_pyramid(model: nn.Module, size: Size) -> None:
    """Raise if images of that size cannot be taken."""
    step = int(model.patch_embed.proj.stride[0])  # type: ignore[union-attr, index]
    if any(side < 1 or side % step for side in size):
        raise ExportError(f"the size must be multiples of {step} pixels, got {size[0]}x{size[1]}")
