"""Parts that ViT, DeiT and Swin have in common, as ONNX nodes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import nn

from lampq.artifact.onnx.builder import GraphBuilder
from lampq.artifact.onnx.grids import array, grids_of_heads, on_grids, quantized
from lampq.artifact.onnx.sites import linear, operand_grids, product
from lampq.errors import ExportError

INPUT, OUTPUT = "images", "logits"
Size = tuple[int, int]


def require(met: bool, why_not: str) -> None:
    """Raise if the model cannot be exported."""
    if not met:
        raise ExportError(f"the model cannot be exported: {why_not}")


def passes(module: nn.Module | None) -> bool:
    """Whether a module does nothing in evaluation mode."""
    from timm.layers.drop import DropPath

    return module is None or isinstance(module, nn.Identity | nn.Dropout | DropPath)


def norm(g: GraphBuilder, module: nn.Module | None, name: str, x: str) -> str:
    """A LayerNorm, or nothing."""
    if passes(module):
        return x
    known = isinstance(module, nn.LayerNorm) and module.weight is not None
    require(known, f"{name!r} is a {type(module).__name__}, and export knows LayerNorm")
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
    require(known, f"{name!r} is a {type(module).__name__}, and export knows GELU")
    # the spelling that runtimes recognise and fuse
    inner = g.node("Div", x, g.number(math.sqrt(2)), name=f"{name}/scaled")
    inner = g.node("Erf", inner, name=f"{name}/erf")
    inner = g.node("Add", inner, g.number(1), name=f"{name}/raised")
    inner = g.node("Mul", x, inner, name=f"{name}/gated")
    return g.node("Mul", inner, g.number(0.5), name=name)


def mlp(g: GraphBuilder, module: Any, name: str, x: str) -> str:
    """The two layers of an MLP and what is between them."""
    from timm.layers.mlp import Mlp

    require(type(module) is Mlp, f"{name!r} is a {type(module).__name__}, and export knows Mlp")
    x = linear(g, module.fc1, f"{name}.fc1", x)
    x = _activation(g, module.act, f"{name}.act", x)
    x = norm(g, module.norm, f"{name}.norm", x)
    return linear(g, module.fc2, f"{name}.fc2", x)


def scores_and_values(
    g: GraphBuilder, module: Any, name: str, x: str, tokens: int
) -> tuple[str, str]:
    """Products of queries and keys, and the values to be mixed by them, each (., heads, ...)."""
    heads, width = module.num_heads, int(module.qkv.weight.shape[0]) // 3
    left, right = operand_grids(module.qk, f"{name}.qk")
    _, of_values = operand_grids(module.av, f"{name}.av")
    norms = [getattr(module, part, None) for part in ("q_norm", "k_norm")]
    # one grid after the other would be three times the nodes, which take long to load
    shared = grids_of_heads(g, (left, right, of_values), heads) if all(map(passes, norms)) else None
    qkv = linear(g, module.qkv, f"{name}.qkv", x)
    shape = g.whole(0, tokens, 3 * heads, width // heads)
    qkv = g.node("Reshape", qkv, shape, name=f"{name}/heads")
    if shared is not None:
        factors = np.repeat(np.array([module.scale, 1, 1], dtype=np.float32), heads)
        qkv = g.node("Mul", qkv, g.shared(factors[:, None]), name=f"{name}/q_scaled")
        qkv = on_grids(g, shared, -1, f"{name}/operands", qkv)
    named, counts = [f"{name}/{part}" for part in "qkv"], g.whole(heads, heads, heads)
    q, k, v = g.nodes("Split", qkv, counts, name=f"{name}/split", outputs=named, axis=2)
    q = norm(g, norms[0], f"{name}.q_norm", q)
    k = norm(g, norms[1], f"{name}.k_norm", k)
    q = g.node("Transpose", q, name=f"{name}/q_turned", perm=[0, 2, 1, 3])
    k = g.node("Transpose", k, name=f"{name}/k_turned", perm=[0, 2, 3, 1])
    v = g.node("Transpose", v, name=f"{name}/v_turned", perm=[0, 2, 1, 3])
    if shared is None:
        q = g.node("Mul", q, g.number(float(module.scale)), name=f"{name}/q_scaled")
        q = quantized(g, left, f"{name}.qk/left", q)
        k = quantized(g, right, f"{name}.qk/right", k)
        v = quantized(g, of_values, f"{name}.av/right", v)
    return product(g, module.qk, f"{name}.qk", q, k), v


def mixed_values(g: GraphBuilder, module: Any, name: str, scores: str, v: str, tokens: int) -> str:
    """Values mixed by the softmax of the scores, heads joined."""
    shares = g.node("Softmax", scores, name=f"{name}/softmax", axis=-1)
    g.never_negative.add(shares)
    grid, _ = operand_grids(module.av, f"{name}.av")
    shares = quantized(g, grid, f"{name}.av/left", shares)
    mixed = product(g, module.av, f"{name}.av", shares, v)
    turned = g.node("Transpose", mixed, name=f"{name}/turned", perm=[0, 2, 1, 3])
    return g.node("Reshape", turned, g.whole(0, tokens, -1), name=f"{name}/joined")
