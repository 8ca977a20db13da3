"""timm's ViT, DeiT and Swin in explicit form as ONNX graphs, module by module.

Written by hand and not traced: the graph has only what deployment needs, its batch is dynamic, its
nodes carry the names of the modules, and building it takes a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import nn

from lampq.artifact.onnx.builder import BATCH, GraphBuilder
from lampq.artifact.onnx.grids import END, array, sliced
from lampq.artifact.onnx.parts import (
    INPUT,
    OUTPUT,
    mixed_values,
    mlp,
    norm,
    passes,
    require,
    scores_and_values,
)
from lampq.artifact.onnx.sites import linear, patches, total
from lampq.artifact.onnx.swin import swin_stages
from lampq.errors import ExportError
from lampq.graph.attention import ExplicitAttention
from lampq.graph.blocks import explicit_blocks


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
    require(embed.img_size is not None, "the size of its images is not fixed")
    height, width = embed.img_size
    return int(embed.proj.weight.shape[1]), int(height), int(width)


def _classes(model: Any) -> int:
    head = getattr(model.head, "fc", model.head)
    return int(head.weight.shape[0])


def _attention(g: GraphBuilder, module: Any, name: str, x: str, tokens: int) -> str:
    known = isinstance(module, ExplicitAttention) and module.gate is None
    require(known, f"the attention {name!r} is a {type(module).__name__} that export does not know")
    scores, v = scores_and_values(g, module, name, x, tokens)
    mixed = mixed_values(g, module, name, scores, v, tokens)
    mixed = norm(g, module.norm, f"{name}.norm", mixed)
    return linear(g, module.proj, f"{name}.proj", mixed)


def _scaled(g: GraphBuilder, module: nn.Module, name: str, x: str) -> str:
    if passes(module):
        return x
    gamma = getattr(module, "gamma", None)
    require(gamma is not None, f"{name!r} is a {type(module).__name__}, unknown to export")
    return g.node("Mul", x, g.constant(f"{name}.gamma", array(gamma)), name=name)  # type: ignore[arg-type]


def _block(g: GraphBuilder, module: Any, name: str, x: str, tokens: int) -> str:
    known = isinstance(module, explicit_blocks())
    require(known, f"the block {name!r} is a {type(module).__name__}, and export knows Block")
    y = norm(g, module.norm1, f"{name}.norm1", x)
    y = _attention(g, module.attn, f"{name}.attn", y, tokens)
    y = _scaled(g, module.ls1, f"{name}.ls1", y)
    x = total(g, module.sum1, f"{name}.sum1", x, y)
    y = norm(g, module.norm2, f"{name}.norm2", x)
    y = mlp(g, module.mlp, f"{name}.mlp", y)
    y = _scaled(g, module.ls2, f"{name}.ls2", y)
    return g.renamed(total(g, module.sum2, f"{name}.sum2", x, y), f"{name}/output")


def _tokens(g: GraphBuilder, model: Any) -> tuple[str, int]:
    """Patches with the tokens before them and their positions."""
    size = input_size(model)
    x = g.input(INPUT, (BATCH, *size))
    x, grid = patches(g, model.patch_embed.proj, "patch_embed.proj", x, size)
    x = norm(g, model.patch_embed.norm, "patch_embed.norm", x)
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
        require(positions.shape[1] == count, "its positions are not one for each token")
        x = g.node("Add", x, g.constant("pos_embed", positions), name="tokens/placed")
    if prefix:
        # as many copies as there are images
        batch = g.node("Shape", x, name="tokens/shape", start=0, end=1)
        shape = g.node(
            "Concat", batch, g.whole(prefix, first.shape[2]), name="tokens/ahead_shape", axis=0
        )
        repeated = g.node("Expand", g.constant("ahead", first), shape, name="tokens/ahead")
        x = g.node("Concat", repeated, x, name="tokens", axis=1)
    g.tokens = count + prefix
    return x, g.tokens


def _encoded(g: GraphBuilder, model: Any) -> str:
    """The tokens behind all blocks and the last norm."""
    require(model.pos_embed is not None or model.cls_token is None, "it has no positions")
    x, tokens = _tokens(g, model)
    x = norm(g, model.norm_pre, "norm_pre", x)
    for number, block in enumerate(model.blocks):
        x = _block(g, block, f"blocks.{number}", x, tokens)
    return norm(g, model.norm, "norm", x)


def _logits(g: GraphBuilder, head: nn.Module, name: str, x: str) -> str:
    """Logits (batch, classes) of features (batch, 1, channels).

    The features keep their third dimension: a product of two matrices would become a float Gemm.
    """
    logits = linear(g, head, name, x)
    return g.node("Squeeze", logits, g.whole(1), name=f"{name}/logits")


def _vit(g: GraphBuilder, model: Any) -> str:
    require(model.attn_pool is None, "it pools by attention")
    require(model.global_pool in ("token", "avg"), f"it pools by {model.global_pool!r}")
    x = _encoded(g, model)
    if model.global_pool == "token":
        x = sliced(g, x, 0, 1, 1, "pool")
    else:
        prefix = 0 if model.pool_include_prefix else model.num_prefix_tokens
        x = sliced(g, x, prefix, END, 1, "pool/patches") if prefix else x
        x = g.node("ReduceMean", x, name="pool", axes=[1], keepdims=1)
    x = norm(g, model.fc_norm, "fc_norm", x)
    return _logits(g, model.head, "head", x)


def _distilled(g: GraphBuilder, model: Any) -> str:
    x = _encoded(g, model)
    answers = [
        _logits(g, getattr(model, name), name, sliced(g, x, place, place + 1, 1, f"{name}/token"))
        for place, name in enumerate(("head", "head_dist"))
    ]
    both = g.node("Add", *answers, name="answers")
    return g.node("Mul", both, g.number(0.5), name="answer")


def _swin(g: GraphBuilder, model: Any) -> str:
    x, grid = swin_stages(g, model, input_size(model))[-1]
    x = norm(g, model.norm, "norm", x)
    pooled = model.head.global_pool.pool_type
    require(pooled in ("avg", "fast", "fastavg"), f"it pools by {pooled!r}")
    x = g.node("Reshape", x, g.whole(0, grid[0] * grid[1], -1), name="pool/tokens")
    x = g.node("ReduceMean", x, name="pool", axes=[1], keepdims=1)
    return _logits(g, model.head.fc, "head.fc", x)
