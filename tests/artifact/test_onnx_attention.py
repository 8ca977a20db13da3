"""Queries, keys and values as one graph has them: their grids side by side, or one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_onnx import RUNTIMES, run
from timm.models.vision_transformer import Attention
from torch import Tensor, nn

from lampq.artifact.onnx import GraphBuilder
from lampq.artifact.onnx.parts import mixed_values, scores_and_values
from lampq.graph.attention import ExplicitAttention
from lampq.quant.base import Quantizer
from lampq.quant.log import LogQuantizer
from lampq.quant.modules import MatmulFit, QuantMatMul
from lampq.quant.prefix import PrefixQuantizer
from lampq.quant.token import TokenQuantizer
from lampq.quant.uniform import UniformQuantizer
from lampq.types import MatmulSpec
from lampq.verify import off_borders

IMAGES, TOKENS, HEADS, CHANNELS = 2, 6, 2, 4


def uniform(bits: int) -> UniformQuantizer:
    """One grid for each head."""
    steps = torch.tensor([0.31, 0.27]).view(HEADS, 1, 1) * 8 / 2**bits
    zero = torch.tensor([2.0, 3.4]).view(HEADS, 1, 1) * 2**bits / 8
    return UniformQuantizer(bits, steps, zero)


def token(bits: int, axis: int) -> TokenQuantizer:
    """A part of the range of each token."""
    return TokenQuantizer(bits, torch.tensor([0.6, 1.0]).view(HEADS, 1, 1), axis=axis)


def prefix(body: Quantizer, axis: int = -1, count: int = 1) -> PrefixQuantizer:
    """Eight bits for the first tokens."""
    first = TokenQuantizer(8, torch.ones(1), axis=axis)
    return PrefixQuantizer(body.bits, first, body, count=count, axis=axis)


# of queries, of keys, of values; whether all of them are quantized by the same nodes
GRIDS: dict[str, tuple[Quantizer | None, Quantizer | None, Quantizer | None, bool]] = {
    "uniform": (uniform(3), uniform(4), uniform(2), True),
    "ranges per token": (token(3, -1), token(4, -2), uniform(2), True),
    "values with ranges per token": (token(3, -1), token(3, -2), token(3, -1), True),
    "first tokens": (prefix(token(3, -1)), prefix(token(2, -2), -2), prefix(uniform(3)), True),
    "two first tokens of queries": (prefix(token(3, -1), count=2), uniform(3), uniform(3), True),
    "a grid for each channel": (
        uniform(3),
        uniform(3),
        UniformQuantizer(3, torch.linspace(0.2, 0.4, CHANNELS), torch.tensor(3.0)),
        False,
    ),
    "values in float": (uniform(3), uniform(3), None, False),
    "a logarithmic grid": (
        uniform(3),
        uniform(3),
        LogQuantizer(3, torch.tensor(3.0), torch.tensor(1.2), torch.tensor(1.2), step=20),
        False,
    ),
    "no token but first ones": (uniform(3), uniform(3), prefix(uniform(3), count=TOKENS), False),
}


SOFTMAX = UniformQuantizer(8, torch.tensor(1 / 255), torch.tensor(0.0))


def attention(name: str, softmax: Quantizer = SOFTMAX) -> ExplicitAttention:
    """An attention whose projections change nothing, so that inputs can be kept off borders."""
    left, right, of_values, _ = GRIDS[name]
    width = HEADS * CHANNELS
    module = ExplicitAttention(Attention(width, HEADS, qkv_bias=True))
    with torch.no_grad():
        module.qkv.weight.copy_(torch.eye(3 * width)[:, :width])
        module.qkv.weight[width:].copy_(torch.eye(width).repeat(2, 1))
        module.qkv.bias.zero_()
    module.qk = QuantMatMul(MatmulFit(MatmulSpec("attn.qk", "qk", 0), left, right))
    module.av = QuantMatMul(MatmulFit(MatmulSpec("attn.av", "av", 0), softmax, of_values))
    return module.eval()


def heads(x: Tensor) -> Tensor:
    """(images, heads, tokens, channels)."""
    return x.unflatten(-1, (HEADS, CHANNELS)).transpose(1, 2)


def inputs(module: ExplicitAttention) -> Tensor:
    """Tokens that are near to no border of any grid."""
    x = torch.rand((IMAGES, TOKENS, HEADS * CHANNELS), generator=torch.Generator().manual_seed(3))
    x = x * 3 - 1.2
    for _ in range(40):
        before = x
        split = heads(x)
        split = off_borders(module.qk.left, split * module.scale) / module.scale
        split = off_borders(module.qk.right, split.mT).mT
        split = off_borders(module.av.right, split)
        x = split.transpose(1, 2).flatten(2)
        if torch.allclose(before, x, rtol=0, atol=1e-9):
            return x
    raise AssertionError("no inputs off all borders")


def graph_of(module: ExplicitAttention) -> Any:
    """Scores, and quantized values mixed by their softmax."""
    g = GraphBuilder()
    g.tokens = TOKENS
    x = g.input("x", ("batch", TOKENS, HEADS * CHANNELS))
    scores, values = scores_and_values(g, module, "attn", x, TOKENS)
    g.output(mixed_values(g, module, "attn", scores, values, TOKENS), "y", ("batch", "t", "c"))
    return g.model()


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("name", GRIDS)
def test_operands_of_an_attention_give_what_torch_gives(name: str, runtime: str) -> None:
    module = attention(name)
    x = inputs(module)
    module.proj = nn.Identity()
    found = run(graph_of(module), {"x": x.numpy()}, runtime)
    exact = module(x).detach().numpy()
    # a code of the softmax may be another one: 1 / 255 of a value
    np.testing.assert_allclose(found, exact, atol=0.01 * np.ptp(exact), rtol=0)
    np.testing.assert_allclose(np.median(np.abs(found - exact)), 0, atol=1e-6)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_shares_with_ranges_per_token_need_no_least_value(runtime: str) -> None:
    body = LogQuantizer(4, torch.tensor(1.0), torch.tensor(0.0), torch.tensor(0.0), step=20)
    module = attention("first tokens", prefix(body, count=2))
    graph = graph_of(module)
    # those of the operands alone
    assert [node.op_type for node in graph.graph.node].count("ReduceMin") == 1
    x = inputs(module)
    module.proj = nn.Identity()
    exact = module(x).detach().numpy()
    found = run(graph, {"x": x.numpy()}, runtime)
    np.testing.assert_allclose(found, exact, atol=1e-5 * np.ptp(exact), rtol=0)


@pytest.mark.parametrize("name", GRIDS)
def test_even_grids_of_an_attention_are_rounded_at_once(name: str) -> None:
    operators = [node.op_type for node in graph_of(attention(name)).graph.node]
    *_, at_once = GRIDS[name]
    rounded = sum(grid is not None for grid in GRIDS[name][:3])
    extra = isinstance(GRIDS[name][2], PrefixQuantizer) and not at_once
    assert operators.count("Round") == 1 + (1 if at_once else rounded + extra)
