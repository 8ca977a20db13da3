"""The stages of a Swin as ONNX nodes, those of timm and those of detectors."""

from __future__ import annotations

from typing import Any

from lampq.artifact.onnx.builder import BATCH, GraphBuilder
from lampq.artifact.onnx.grids import array, sliced
from lampq.artifact.onnx.parts import (
    INPUT,
    Size,
    mixed_values,
    mlp,
    norm,
    passes,
    require,
    scores_and_values,
)
from lampq.artifact.onnx.sites import linear, patches, total
from lampq.graph.attention import ExplicitWindowAttention
from lampq.graph.blocks import explicit_blocks
from lampq.graph.windows import padded_swin_block, shift_mask


def _rolled(g: GraphBuilder, x: str, shift: int, size: int, axis: int, name: str) -> str:
    """Rows moved towards the front by ``shift``, round the end."""
    if shift % size == 0:
        return x
    front = sliced(g, x, 0, shift % size, axis, f"{name}/front")
    back = sliced(g, x, shift % size, size, axis, f"{name}/back")
    return g.node("Concat", back, front, name=name, axis=axis)


def _window_attention(g: GraphBuilder, module: Any, name: str, x: str, mask: Any) -> str:
    known = isinstance(module, ExplicitWindowAttention)
    require(known, f"the attention {name!r} is a {type(module).__name__} that export does not know")
    tokens = module.relative_position_index.shape[0]
    scores, v = scores_and_values(g, module, name, x, tokens)
    table = array(module.relative_position_bias_table)
    index = module.relative_position_index.flatten().numpy()
    bias = table[index].reshape(tokens, tokens, -1).transpose(2, 0, 1)
    scores = g.node("Add", scores, g.constant(f"{name}.bias", bias), name=f"{name}/biased")
    if mask is not None:
        heads, windows = module.num_heads, len(mask)
        grouped = g.whole(-1, windows, heads, tokens, tokens)
        scores = g.node("Reshape", scores, grouped, name=f"{name}/grouped")
        hidden = g.constant(f"{name}.mask", array(mask)[None, :, None])
        scores = g.node("Add", scores, hidden, name=f"{name}/masked")
        flat = g.whole(-1, heads, tokens, tokens)
        scores = g.node("Reshape", scores, flat, name=f"{name}/scores")
    mixed = mixed_values(g, module, name, scores, v, tokens)
    return linear(g, module.proj, f"{name}.proj", mixed)


def _swin_block(g: GraphBuilder, module: Any, name: str, x: str, size: Size) -> str:
    """One block on maps (batch, height, width, channels)."""
    (height, width), (rows, columns) = size, module.window_size
    below, right = -height % rows, -width % columns
    whole = (height + below, width + right)
    y = norm(g, module.norm1, f"{name}.norm1", x)
    # blocks of detectors pad before they shift, timm's after
    first = isinstance(module, padded_swin_block())
    require(first or not getattr(module, "dynamic_mask", False), "its windows change")
    if first:
        y = _bordered(g, y, module.norm1.padding, size, whole, name)
    y = _shifted(g, y, module.shift_size, whole if first else size, f"{name}/rolled")
    if not first and (below or right):
        pads = g.whole(0, 0, 0, 0, 0, below, right, 0)
        y = g.node("Pad", y, pads, name=f"{name}/padded")
    mask = None
    if any(module.shift_size):
        windows = (rows, columns), tuple(module.shift_size)
        mask = shift_mask(*whole, *windows) if first else module.attn_mask
    y = _windowed(g, module, name, y, whole, mask)
    if not first:
        y = _cropped(g, y, size, whole, name)
    back = tuple(-shift for shift in module.shift_size)
    y = _shifted(g, y, back, whole if first else size, f"{name}/unrolled")
    if first:
        y = _cropped(g, y, size, whole, name)
    x = total(g, module.sum1, f"{name}.sum1", x, y)
    y = norm(g, module.norm2, f"{name}.norm2", x)
    y = mlp(g, module.mlp, f"{name}.mlp", y)
    return g.renamed(total(g, module.sum2, f"{name}.sum2", x, y), f"{name}/output")


def _shifted(g: GraphBuilder, x: str, shifts: Any, size: Size, name: str) -> str:
    for axis, (shift, length) in enumerate(zip(shifts, size, strict=True), start=1):
        x = _rolled(g, x, shift, length, axis, f"{name}{axis}")
    return x


def _cropped(g: GraphBuilder, x: str, size: Size, whole: Size, name: str) -> str:
    for axis, (length, padded) in enumerate(zip(size, whole, strict=True), start=1):
        x = x if length == padded else sliced(g, x, 0, length, axis, f"{name}/cropped{axis}")
    return x


def _bordered(g: GraphBuilder, x: str, value: Any, size: Size, whole: Size, name: str) -> str:
    """Maps with more rows and columns of one value for each channel."""
    border = g.constant(f"{name}.padding", array(value)[None, None, None])
    sides = list(size)
    for axis in (1, 2):
        more = whole[axis - 1] - size[axis - 1]
        if not more:
            continue
        batch = g.node("Shape", x, name=f"{name}/batch{axis}", start=0, end=1)
        sides[axis - 1] = more
        rest = g.whole(*sides, len(value))
        shape = g.node("Concat", batch, rest, name=f"{name}/border_shape{axis}", axis=0)
        added = g.node("Expand", border, shape, name=f"{name}/border{axis}")
        x = g.node("Concat", x, added, name=f"{name}/bordered{axis}", axis=axis)
        sides[axis - 1] = whole[axis - 1]
    return x


def _windowed(g: GraphBuilder, module: Any, name: str, y: str, whole: Size, mask: Any) -> str:
    """Attention inside the windows of maps that are whole windows."""
    rows, columns = module.window_size
    channels = int(module.norm1.weight.shape[0])
    down, across = whole[0] // rows, whole[1] // columns
    y = g.node("Reshape", y, g.whole(0, down, rows, across, columns, channels), name=f"{name}/cut")
    y = g.node("Transpose", y, name=f"{name}/windows", perm=[0, 1, 3, 2, 4, 5])
    y = g.node("Reshape", y, g.whole(-1, rows * columns, channels), name=f"{name}/tokens")
    y = _window_attention(g, module.attn, f"{name}.attn", y, mask)
    y = g.node(
        "Reshape", y, g.whole(-1, down, across, rows, columns, channels), name=f"{name}/uncut"
    )
    y = g.node("Transpose", y, name=f"{name}/unwindowed", perm=[0, 1, 3, 2, 4, 5])
    return g.node("Reshape", y, g.whole(0, *whole, channels), name=f"{name}/maps")


def _merged(g: GraphBuilder, module: Any, name: str, x: str, size: tuple[int, int]) -> str:
    """Patches merged two by two."""
    channels = int(module.norm.weight.shape[0]) // 4
    below, right = size[0] % 2, size[1] % 2
    if below or right:
        x = g.node("Pad", x, g.whole(0, 0, 0, 0, 0, below, right, 0), name=f"{name}/padded")
    down, across = (size[0] + below) // 2, (size[1] + right) // 2
    x = g.node("Reshape", x, g.whole(0, down, 2, across, 2, channels), name=f"{name}/pairs")
    x = g.node("Transpose", x, name=f"{name}/turned", perm=[0, 1, 3, 4, 2, 5])
    x = g.node("Reshape", x, g.whole(0, down, across, 4 * channels), name=f"{name}/joined")
    x = norm(g, module.norm, f"{name}.norm", x)
    return linear(g, module.reduction, f"{name}.reduction", x)


def swin_stages(g: GraphBuilder, model: Any, size: tuple[int, int, int]) -> list[tuple[str, Size]]:
    """What every stage of a Swin gives, maps (batch, height, width, channels), and their sizes."""
    from timm.models.swin_transformer import PatchMerging

    x = g.input(INPUT, (BATCH, *size))
    x, grid = patches(g, model.patch_embed.proj, "patch_embed.proj", x, size)
    x = g.node("Reshape", x, g.whole(0, *grid, -1), name="patch_embed/maps")
    x = norm(g, model.patch_embed.norm, "patch_embed.norm", x)
    found = []
    for place, stage in enumerate(model.layers):
        name = f"layers.{place}"
        if isinstance(stage.downsample, PatchMerging):
            x = _merged(g, stage.downsample, f"{name}.downsample", x, grid)
            grid = ((grid[0] + 1) // 2, (grid[1] + 1) // 2)
        else:
            require(passes(stage.downsample), f"{name!r} is downsampled in an unknown way")
        for number, block in enumerate(stage.blocks):
            known = isinstance(block, explicit_blocks())
            require(known, f"a block of {name!r} is a {type(block).__name__}")
            x = _swin_block(g, block, f"{name}.blocks.{number}", x, grid)
        found.append((x, grid))
    return found
