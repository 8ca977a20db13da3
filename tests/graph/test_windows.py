"""Swin blocks on maps that are no whole number of windows."""

from __future__ import annotations

import copy

import pytest
import torch
from timm.models.swin_transformer import SwinTransformerBlock
from torch import Tensor, nn

from lampq.graph.attention import explicit
from lampq.graph.windows import padded_swin_block, shift_mask
from lampq.quant.fold import NormFold, PaddedNorm, fold_norm_

CHANNELS, WINDOW = 8, 4


def _block(shift: int) -> SwinTransformerBlock:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        block = SwinTransformerBlock(
            CHANNELS,
            (16, 16),
            num_heads=2,
            window_size=WINDOW,
            shift_size=shift,
            always_partition=True,
            dynamic_mask=True,
        ).eval()
        for parameter in block.parameters():
            parameter.data += 0.3 * torch.randn(parameter.shape)
    return block


def _map(rows: int, columns: int) -> Tensor:
    return torch.randn(2, rows, columns, CHANNELS, generator=torch.Generator().manual_seed(1))


def _by_definition(block: SwinTransformerBlock, x: Tensor, shift: int) -> Tensor:
    """Attention of the padded and shifted map, one pair of places after another."""
    normed = block.norm1(x)
    rows, columns = -(-x.shape[1] // WINDOW) * WINDOW, -(-x.shape[2] // WINDOW) * WINDOW
    full = x.new_zeros(len(x), rows, columns, CHANNELS)
    full[:, : x.shape[1], : x.shape[2]] = normed
    query, key, value = block.attn.qkv(full).chunk(3, dim=-1)
    mixed = torch.zeros_like(full)
    # a place of the shifted map (i, j) is the place (i + shift, j + shift) of the map
    places = [(i, j) for i in range(rows) for j in range(columns)]
    heads, width = 2, CHANNELS // 2
    for i, j in places:
        y, z = (i + shift) % rows, (j + shift) % columns
        others = [
            (k, m)
            for k, m in places
            if k // WINDOW == i // WINDOW
            and m // WINDOW == j // WINDOW
            # what has come around the edge is no neighbour
            and (k + shift >= rows) == (i + shift >= rows)
            and (m + shift >= columns) == (j + shift >= columns)
        ]
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            scores, values = [], []
            for k, m in others:
                u, v = (k + shift) % rows, (m + shift) % columns
                step = (i - k + WINDOW - 1) * (2 * WINDOW - 1) + j - m + WINDOW - 1
                bias = block.attn.relative_position_bias_table[step, head]
                product = (query[:, y, z, part] * key[:, u, v, part]).sum(-1)
                scores.append(product * width**-0.5 + bias)
                values.append(value[:, u, v, part])
            share = torch.stack(scores).softmax(0)
            mixed[:, y, z, part] = (share[..., None] * torch.stack(values)).sum(0)
    return block.attn.proj(mixed)[:, : x.shape[1], : x.shape[2]]


@pytest.mark.parametrize("shift", [0, 2], ids=["still", "shifted"])
@pytest.mark.parametrize("size", [(8, 8), (6, 7), (3, 9)], ids=["whole", "padded", "low"])
@torch.no_grad()
def test_attention_is_that_of_the_padded_and_then_shifted_map(
    size: tuple[int, int], shift: int
) -> None:
    block, x = _block(shift), _map(*size)
    padded = padded_swin_block()(block)
    expected = _by_definition(block, x, shift)
    torch.testing.assert_close(padded._attn(block.norm1(x)), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_whole_map_gives_what_timm_gives_and_a_padded_one_does_not() -> None:
    block = _block(2)
    padded = padded_swin_block()(block)
    torch.testing.assert_close(padded(_map(8, 12)), block(_map(8, 12)))
    assert not torch.allclose(padded(_map(6, 7)), block(_map(6, 7)), atol=1e-2)


def test_windows_that_have_not_come_around_have_no_mask() -> None:
    mask = shift_mask(8, 12, (4, 4), (2, 2))
    assert mask.shape == (6, 16, 16)
    assert not mask[0].any()
    assert not mask[1].any()
    assert mask[2].any()
    assert mask[3].any()


@pytest.mark.parametrize("shift", [0, 2], ids=["still", "shifted"])
@torch.no_grad()
def test_the_explicit_form_gives_the_same(shift: int) -> None:
    model = nn.Sequential(padded_swin_block()(_block(shift)))
    opened = explicit(model)
    assert type(opened[0]) is not type(model[0])
    assert explicit(opened)[0].__class__ is opened[0].__class__
    for size in ((8, 8), (6, 7)):
        torch.testing.assert_close(opened(_map(*size)), model(_map(*size)))


@torch.no_grad()
def test_a_fold_of_the_norm_moves_the_padding_with_it() -> None:
    opened = explicit(nn.Sequential(padded_swin_block()(_block(2))))
    folded = copy.deepcopy(opened)
    generator = torch.Generator().manual_seed(2)
    draw = torch.rand(2, CHANNELS, generator=generator)
    fold = NormFold(draw[0] + 0.5, draw[1] - 0.5)
    block = folded[0]
    assert isinstance(block.norm1, PaddedNorm)
    qkv = block.attn.qkv
    weight, bias = fold.of_linear(qkv.weight, qkv.bias)
    qkv.weight, qkv.bias = nn.Parameter(weight), nn.Parameter(bias)
    fold_norm_(block.norm1, fold)
    x = _map(6, 7)
    torch.testing.assert_close(folded(x), opened(x), rtol=1e-4, atol=1e-5)
    block.norm1.padding.zero_()
    assert not torch.allclose(folded(x), opened(x), atol=1e-2)
