"""timm's ViT, DeiT and Swin in explicit form as ONNX graphs, module by module.

Written by hand and not traced: the graph has only what deployment needs, its batch is dynamic, its
nodes carry the names of the modules, and building it takes a fraction of a second.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import nn

from lampq.artifact.onnx.builder import BATCH, GraphBuilder
from lampq.artifact.onnx.sites import array, linear, matmul, patches, total
from lampq.errors import ExportError
from lampq.graph.attention import ExplicitAttention, ExplicitWindowAttention
from lampq.graph.blocks import explicit_blocks

INPUT, OUTPUT = "images", "logits"


def emit_model(g: GraphBuilder, model: nn.Module) -> None:
    """The whole model, from images (batch, channels, height, width) to logits (batch, classes)."""
    from timm.models.deit import VisionTransformerDistilled
    from timm.models.swin_transformer import SwinTransformer
    from timm.models.vision_transformer import VisionTransformer

    families: dict[type[nn.Module], Callable[[GraphBuilder, Any], str]] = {
        VisionTransformer: _vit,
        VisionTransformerDistilled: _distilled,
        SwinTransformer: _swin,
    }
    emit = families.get(type(model))
    if emit is None:
        raise ExportError(
            f"export knows timm's VisionTransformer, VisionTransformerDistilled and "
            f"SwinTransformer, and the model is a {type(model).__name__}"
        )
    g.output(emit(g, model), OUTPUT, (BATCH, _classes(model)))


def input_size(model: Any) -> tuple[int, int, int]:
    """Channels, height and width of the images that the model takes."""
    embed = model.patch_embed
    _require(embed.img_size is not None, "the size of its images is not fixed")
    height, width = embed.img_size
    return int(embed.proj.weight.shape[1]), int(height), int(width)


def _classes(model: Any) -> int:
    head = getattr(model.head, "fc", model.head)
    return int(head.weight.shape[0])


def _require(met: bool, why_not: str) -> None:
    if not met:
        raise ExportError(f"the model cannot be exported: {why_not}")


def _passes(module: nn.Module | None) -> bool:
    """Whether a module does nothing in evaluation mode."""
    from timm.layers.drop import DropPath

    return module is None or isinstance(module, nn.Identity | nn.Dropout | DropPath)


def _norm(g: GraphBuilder, module: nn.Module, name: str, x: str) -> str:
    if _passes(module):
        return x
    known = isinstance(module, nn.LayerNorm) and module.weight is not None
    _require(known, f"{name!r} is a {type(module).__name__}, and export knows LayerNorm")
    assert isinstance(module, nn.LayerNorm), "just checked"
    inputs = [x, g.constant(f"{name}.weight", array(module.weight))]
    if module.bias is not None:
        inputs.append(g.constant(f"{name}.bias", array(module.bias)))
    axis = -len(module.normalized_shape)
    return g.node("LayerNormalization", *inputs, name=name, axis=axis, epsilon=module.eps)


def _activation(g: GraphBuilder, module: nn.Module, name: str, x: str) -> str:
    from timm.layers import GELU, QuickGELU

    if isinstance(module, QuickGELU):
        inner = g.node("Mul", x, g.number(1.702), name=f"{name}/scaled")
        return g.node("Mul", x, g.node("Sigmoid", inner, name=f"{name}/gate"), name=name)
    exact = getattr(module, "approximate", "none") == "none"
    known = isinstance(module, nn.GELU | GELU) and exact
    _require(known, f"{name!r} is a {type(module).__name__}, and export knows GELU")
    # the spelling that runtimes recognise and fuse
    inner = g.node("Div", x, g.number(math.sqrt(2)), name=f"{name}/scaled")
    inner = g.node("Erf", inner, name=f"{name}/erf")
    inner = g.node("Add", inner, g.number(1), name=f"{name}/raised")
    inner = g.node("Mul", x, inner, name=f"{name}/gated")
    return g.node("Mul", inner, g.number(0.5), name=name)


def _mlp(g: GraphBuilder, module: Any, name: str, x: str) -> str:
    from timm.layers.mlp import Mlp

    _require(type(module) is Mlp, f"{name!r} is a {type(module).__name__}, and export knows Mlp")
    x = linear(g, module.fc1, f"{name}.fc1", x)
    x = _activation(g, module.act, f"{name}.act", x)
    x = _norm(g, module.norm, f"{name}.norm", x)
    return linear(g, module.fc2, f"{name}.fc2", x)


def _heads(g: GraphBuilder, module: Any, name: str, x: str, tokens: int) -> tuple[str, str, str]:
    """Queries, keys (turned) and values, each (., heads, ...)."""
    width = int(module.qkv.weight.shape[0]) // 3
    qkv = linear(g, module.qkv, f"{name}.qkv", x)
    named = [f"{name}/{part}" for part in "qkv"]
    parts = g.nodes(
        "Split", qkv, g.whole(width, width, width), name=f"{name}/split", outputs=named, axis=-1
    )
    shape = g.whole(0, tokens, module.num_heads, width // module.num_heads)
    q, k, v = (g.node("Reshape", part, shape, name=f"{part}_heads") for part in parts)
    if isinstance(module, ExplicitAttention):
        q = _norm(g, module.q_norm, f"{name}.q_norm", q)
        k = _norm(g, module.k_norm, f"{name}.k_norm", k)
    q = g.node("Transpose", q, name=f"{name}/q_turned", perm=[0, 2, 1, 3])
    k = g.node("Transpose", k, name=f"{name}/k_turned", perm=[0, 2, 3, 1])
    v = g.node("Transpose", v, name=f"{name}/v_turned", perm=[0, 2, 1, 3])
    q = g.node("Mul", q, g.number(float(module.scale)), name=f"{name}/q_scaled")
    return q, k, v


def _mixed(g: GraphBuilder, module: Any, name: str, scores: str, v: str, tokens: int) -> str:
    """Values mixed by the softmax of the scores, heads joined."""
    shares = g.node("Softmax", scores, name=f"{name}/softmax", axis=-1)
    mixed = matmul(g, module.av, f"{name}.av", shares, v)
    turned = g.node("Transpose", mixed, name=f"{name}/turned", perm=[0, 2, 1, 3])
    return g.node("Reshape", turned, g.whole(0, tokens, -1), name=f"{name}/joined")


def _attention(g: GraphBuilder, module: Any, name: str, x: str, tokens: int) -> str:
    known = isinstance(module, ExplicitAttention) and module.gate is None
    _require(
        known, f"the attention {name!r} is a {type(module).__name__} that export does not know"
    )
    q, k, v = _heads(g, module, name, x, tokens)
    scores = matmul(g, module.qk, f"{name}.qk", q, k)
    mixed = _mixed(g, module, name, scores, v, tokens)
    mixed = _norm(g, module.norm, f"{name}.norm", mixed)
    return linear(g, module.proj, f"{name}.proj", mixed)


def _scaled(g: GraphBuilder, module: nn.Module, name: str, x: str) -> str:
    if _passes(module):
        return x
    gamma = getattr(module, "gamma", None)
    _require(gamma is not None, f"{name!r} is a {type(module).__name__}, unknown to export")
    return g.node("Mul", x, g.constant(f"{name}.gamma", array(gamma)), name=name)  # type: ignore[arg-type]


def _block(g: GraphBuilder, module: Any, name: str, x: str, tokens: int) -> str:
    known = isinstance(module, explicit_blocks())
    _require(known, f"the block {name!r} is a {type(module).__name__}, and export knows Block")
    y = _norm(g, module.norm1, f"{name}.norm1", x)
    y = _attention(g, module.attn, f"{name}.attn", y, tokens)
    y = _scaled(g, module.ls1, f"{name}.ls1", y)
    x = total(g, module.sum1, f"{name}.sum1", x, y)
    y = _norm(g, module.norm2, f"{name}.norm2", x)
    y = _mlp(g, module.mlp, f"{name}.mlp", y)
    y = _scaled(g, module.ls2, f"{name}.ls2", y)
    return g.renamed(total(g, module.sum2, f"{name}.sum2", x, y), f"{name}/output")


def _tokens(g: GraphBuilder, model: Any) -> tuple[str, int]:
    """Patches with the tokens before them and their positions."""
    size = input_size(model)
    x = g.input(INPUT, (BATCH, *size))
    x, grid = patches(g, model.patch_embed.proj, "patch_embed.proj", x, size)
    x = _norm(g, model.patch_embed.norm, "patch_embed.norm", x)
    count = grid[0] * grid[1]
    ahead = [
        array(token)
        for token in (model.cls_token, getattr(model, "dist_token", None), model.reg_token)
        if token is not None
    ]
    positions = None if model.pos_embed is None else array(model.pos_embed)
    prefix = sum(token.shape[1] for token in ahead)
    if positions is not None and model.no_embed_class:
        positions = np.pad(positions, ((0, 0), (prefix, 0), (0, 0)))
    if prefix:
        # the tokens are constant: their positions are added here
        first = np.concatenate(ahead, axis=1)
        if positions is not None:
            first = first + positions[:, :prefix]
            positions = positions[:, prefix:]
    if positions is not None:
        _require(positions.shape[1] == count, "its positions are not one for each token")
        x = g.node("Add", x, g.constant("pos_embed", positions), name="tokens/placed")
    if prefix:
        # as many copies as there are images
        batch = g.node("Shape", x, name="tokens/shape", start=0, end=1)
        shape = g.node(
            "Concat", batch, g.whole(prefix, first.shape[2]), name="tokens/ahead_shape", axis=0
        )
        repeated = g.node("Expand", g.constant("ahead", first), shape, name="tokens/ahead")
        x = g.node("Concat", repeated, x, name="tokens", axis=1)
    return x, count + prefix


def _encoded(g: GraphBuilder, model: Any) -> str:
    """The tokens behind all blocks and the last norm."""
    _require(model.pos_embed is not None or model.cls_token is None, "it has no positions")
    x, tokens = _tokens(g, model)
    x = _norm(g, model.norm_pre, "norm_pre", x)
    for number, block in enumerate(model.blocks):
        x = _block(g, block, f"blocks.{number}", x, tokens)
    return _norm(g, model.norm, "norm", x)


def _slice(g: GraphBuilder, x: str, start: int, end: int, axis: int, name: str) -> str:
    limits = (g.whole(value) for value in (start, end, axis))
    return g.node("Slice", x, *limits, name=name)


def _logits(g: GraphBuilder, head: nn.Module, name: str, x: str) -> str:
    """Logits (batch, classes) of features (batch, 1, channels).

    The features keep their third dimension: a product of two matrices would become a float Gemm.
    """
    logits = linear(g, head, name, x)
    return g.node("Squeeze", logits, g.whole(1), name=f"{name}/logits")


def _vit(g: GraphBuilder, model: Any) -> str:
    _require(model.attn_pool is None, "it pools by attention")
    _require(model.global_pool in ("token", "avg"), f"it pools by {model.global_pool!r}")
    x = _encoded(g, model)
    if model.global_pool == "token":
        x = _slice(g, x, 0, 1, 1, "pool")
    else:
        prefix = 0 if model.pool_include_prefix else model.num_prefix_tokens
        x = _slice(g, x, prefix, 2**31 - 1, 1, "pool/patches") if prefix else x
        x = g.node("ReduceMean", x, name="pool", axes=[1], keepdims=1)
    x = _norm(g, model.fc_norm, "fc_norm", x)
    return _logits(g, model.head, "head", x)


def _distilled(g: GraphBuilder, model: Any) -> str:
    x = _encoded(g, model)
    answers = [
        _logits(g, getattr(model, name), name, _slice(g, x, place, place + 1, 1, f"{name}/token"))
        for place, name in enumerate(("head", "head_dist"))
    ]
    both = g.node("Add", *answers, name="answers")
    return g.node("Mul", both, g.number(0.5), name="answer")


def _rolled(g: GraphBuilder, x: str, shift: int, size: int, axis: int, name: str) -> str:
    """Rows moved towards the front by ``shift``, round the end."""
    if shift % size == 0:
        return x
    front = _slice(g, x, 0, shift % size, axis, f"{name}/front")
    back = _slice(g, x, shift % size, size, axis, f"{name}/back")
    return g.node("Concat", back, front, name=name, axis=axis)


def _window_attention(g: GraphBuilder, module: Any, name: str, x: str, mask: Any) -> str:
    known = isinstance(module, ExplicitWindowAttention)
    _require(
        known, f"the attention {name!r} is a {type(module).__name__} that export does not know"
    )
    tokens = module.relative_position_index.shape[0]
    q, k, v = _heads(g, module, name, x, tokens)
    scores = matmul(g, module.qk, f"{name}.qk", q, k)
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
    mixed = _mixed(g, module, name, scores, v, tokens)
    return linear(g, module.proj, f"{name}.proj", mixed)


def _swin_block(g: GraphBuilder, module: Any, name: str, x: str, size: tuple[int, int]) -> str:
    """One block on maps (batch, height, width, channels)."""
    (height, width), (rows, columns) = size, module.window_size
    channels = int(module.norm1.weight.shape[0])
    _require(not getattr(module, "dynamic_mask", False), "its windows change with the image")
    y = _norm(g, module.norm1, f"{name}.norm1", x)
    for axis, (shift, length) in enumerate(zip(module.shift_size, size, strict=True), start=1):
        y = _rolled(g, y, shift, length, axis, f"{name}/rolled{axis}")
    below, right = -height % rows, -width % columns
    if below or right:
        pads = g.whole(0, 0, 0, 0, 0, below, right, 0)
        y = g.node("Pad", y, pads, name=f"{name}/padded")
    down, across = (height + below) // rows, (width + right) // columns
    y = g.node("Reshape", y, g.whole(0, down, rows, across, columns, channels), name=f"{name}/cut")
    y = g.node("Transpose", y, name=f"{name}/windows", perm=[0, 1, 3, 2, 4, 5])
    y = g.node("Reshape", y, g.whole(-1, rows * columns, channels), name=f"{name}/tokens")
    mask = module.attn_mask if any(module.shift_size) else None
    y = _window_attention(g, module.attn, f"{name}.attn", y, mask)
    y = g.node(
        "Reshape", y, g.whole(-1, down, across, rows, columns, channels), name=f"{name}/uncut"
    )
    y = g.node("Transpose", y, name=f"{name}/unwindowed", perm=[0, 1, 3, 2, 4, 5])
    full = g.whole(0, height + below, width + right, channels)
    y = g.node("Reshape", y, full, name=f"{name}/maps")
    if below:
        y = _slice(g, y, 0, height, 1, f"{name}/cropped1")
    if right:
        y = _slice(g, y, 0, width, 2, f"{name}/cropped2")
    for axis, (shift, length) in enumerate(zip(module.shift_size, size, strict=True), start=1):
        y = _rolled(g, y, -shift, length, axis, f"{name}/unrolled{axis}")
    x = total(g, module.sum1, f"{name}.sum1", x, y)
    y = _norm(g, module.norm2, f"{name}.norm2", x)
    y = _mlp(g, module.mlp, f"{name}.mlp", y)
    return g.renamed(total(g, module.sum2, f"{name}.sum2", x, y), f"{name}/output")


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
    x = _norm(g, module.norm, f"{name}.norm", x)
    return linear(g, module.reduction, f"{name}.reduction", x)


def _swin(g: GraphBuilder, model: Any) -> str:
    from timm.models.swin_transformer import PatchMerging

    size = input_size(model)
    x = g.input(INPUT, (BATCH, *size))
    x, grid = patches(g, model.patch_embed.proj, "patch_embed.proj", x, size)
    x = g.node("Reshape", x, g.whole(0, *grid, -1), name="patch_embed/maps")
    x = _norm(g, model.patch_embed.norm, "patch_embed.norm", x)
    for place, stage in enumerate(model.layers):
        name = f"layers.{place}"
        if isinstance(stage.downsample, PatchMerging):
            x = _merged(g, stage.downsample, f"{name}.downsample", x, grid)
            grid = ((grid[0] + 1) // 2, (grid[1] + 1) // 2)
        else:
            _require(_passes(stage.downsample), f"{name!r} is downsampled in an unknown way")
        for number, block in enumerate(stage.blocks):
            known = isinstance(block, explicit_blocks())
            _require(known, f"a block of {name!r} is a {type(block).__name__}")
            x = _swin_block(g, block, f"{name}.blocks.{number}", x, grid)
    x = _norm(g, model.norm, "norm", x)
    pooled = model.head.global_pool.pool_type
    _require(pooled in ("avg", "fast", "fastavg"), f"it pools by {pooled!r}")
    x = g.node("Reshape", x, g.whole(0, grid[0] * grid[1], -1), name="pool/tokens")
    x = g.node("ReduceMean", x, name="pool", axes=[1], keepdims=1)
    return _logits(g, model.head.fc, "head.fc", x)
