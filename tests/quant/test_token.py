from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from lampq.errors import ConfigError
from lampq.quant.base import CodedQuantizer, describe, rebuild
from lampq.quant.log import LogQuantizer, ZeroCode
from lampq.quant.token import TokenLogQuantizer, TokenQuantizer
from lampq.quant.uniform import UniformQuantizer

widths = pytest.mark.parametrize("bits", range(1, 9))
clips = pytest.mark.parametrize("clip", [0.3, 0.8, 1.0])
ONE = torch.tensor(1.0)


def tokens(*shape: int) -> Tensor:
    """Tokens of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-4, 4, shape[-2])[:, None]
    return torch.randn(shape, generator=generator) * sizes


@widths
@clips
def test_every_token_has_at_most_so_many_values_inside_its_own_range(
    bits: int, clip: float
) -> None:
    x = tokens(50, 300)
    values = TokenQuantizer(bits, torch.tensor(clip))(x)
    assert max(len(row.unique()) for row in values) <= 2**bits
    assert bool((values.amin(1) >= clip * x.amin(1) * (1 + 1e-5)).all())
    assert bool((values.amax(1) <= clip * x.amax(1) * (1 + 1e-5)).all())


@widths
def test_inside_the_clipped_range_the_error_is_half_a_step_at_most(bits: int) -> None:
    x, clip = tokens(50, 300), 0.7
    low, high = clip * x.amin(1, keepdim=True), clip * x.amax(1, keepdim=True)
    values = TokenQuantizer(bits, torch.tensor(clip))(x)
    step = (high - low) / (2**bits - 1)
    inside = (x >= low) & (x <= high)
    assert bool((((values - x).abs() <= 0.5001 * step) | ~inside).all())
    torch.testing.assert_close(values[x > high], high.expand_as(x)[x > high])
    torch.testing.assert_close(values[x < low], low.expand_as(x)[x < low])


@widths
def test_a_token_does_not_depend_on_the_others(bits: int) -> None:
    x = tokens(6, 40)
    quantizer = TokenQuantizer(bits, torch.tensor(0.9))
    assert torch.equal(quantizer(x)[2:3], quantizer(x[2:3]))
    # nor on its own size: a power of two changes no digit
    assert torch.equal(quantizer(8 * x), 8 * quantizer(x))


@widths
@clips
def test_keys_that_come_transposed_have_the_same_values(bits: int, clip: float) -> None:
    x = tokens(2, 3, 7, 16)
    clip_of = torch.tensor(clip)
    straight, turned = TokenQuantizer(bits, clip_of), TokenQuantizer(bits, clip_of, axis=-2)
    assert torch.equal(turned(x.mT), straight(x).mT)
    assert torch.equal(turned.encode(x.mT), straight.encode(x).mT)


def test_each_head_has_its_own_clip() -> None:
    x, clip = tokens(2, 3, 7, 16), torch.tensor([0.4, 0.7, 1.0])
    values = TokenQuantizer(4, clip[:, None, None])(x)
    for head in range(3):
        assert torch.equal(values[:, head], TokenQuantizer(4, clip[head])(x[:, head]))


@widths
def test_whole_ranges_are_quantized_to_themselves_and_clipped_ones_are_not(bits: int) -> None:
    x = tokens(20, 100)
    whole, part = TokenQuantizer(bits, ONE), TokenQuantizer(bits, torch.tensor(0.6))
    assert torch.equal(whole.encode(whole(x)), whole.encode(x))
    moved = (whole(whole(x)) - whole(x)).abs()
    assert bool((moved <= 1e-6 * x.abs().amax(1, keepdim=True)).all())
    assert not torch.allclose(part(part(x)), part(x))


@widths
@pytest.mark.parametrize("constant", [0.0, 0.7, -3.0, 1e-20, 1e20])
def test_constant_tokens_keep_their_value(bits: int, constant: float) -> None:
    x = torch.full((3, 10), constant)
    torch.testing.assert_close(TokenQuantizer(bits, ONE)(x), x)


@widths
@clips
def test_zero_is_kept_by_tokens_of_one_sign_and_nearly_so_by_others(bits: int, clip: float) -> None:
    quantizer = TokenQuantizer(bits, torch.tensor(clip))
    x = tokens(20, 50)
    x[:, 0] = 0
    assert bool((quantizer(x.abs())[:, 0] == 0).all())
    size = x.abs().amax(1)
    assert bool((quantizer(-x.abs())[:, 0].abs() <= 1e-6 * size).all())
    span = clip * (x.amax(1) - x.amin(1))
    assert bool((quantizer(x)[:, 0].abs() <= 0.5001 * span / (2**bits - 1)).all())


def test_the_grid_of_its_tokens_decodes_the_codes() -> None:
    x = tokens(5, 30)
    quantizer = TokenQuantizer(3, torch.tensor(0.8))
    assert not isinstance(quantizer, CodedQuantizer)
    grid = quantizer.at(x)
    assert isinstance(grid, UniformQuantizer)
    assert torch.equal(grid.decode(quantizer.encode(x)), quantizer(x))


def test_another_axis_is_refused() -> None:
    with pytest.raises(ConfigError, match="on axis -1 or -2, got 0"):
        TokenQuantizer(3, ONE, axis=0)


@pytest.mark.parametrize("clip", [-0.1, 0.0, 1.01])
def test_what_is_no_part_of_a_range_is_refused(clip: float) -> None:
    with pytest.raises(ConfigError, match="above 0 and up to 1, got"):
        TokenQuantizer(3, torch.tensor([0.5, clip]))


SHIFT = torch.tensor([0.17])
bases = pytest.mark.parametrize("step", [10, 37, 90])


def shares(*shape: int) -> Tensor:
    """Rows that add up to one, some of a few large values, some of many small ones."""
    generator = torch.Generator().manual_seed(0)
    sharpness = torch.logspace(-2, 1, shape[-2])[:, None]
    return (torch.randn(shape, generator=generator) * sharpness).softmax(-1)


@widths
@clips
@bases
@pytest.mark.parametrize("zero_code", ["extra", "reserved"])
def test_each_token_is_that_of_a_log_quantizer_of_its_own_scale(
    bits: int, clip: float, step: int, zero_code: ZeroCode
) -> None:
    x = tokens(20, 50)
    quantizer = TokenLogQuantizer(bits, torch.tensor([clip]), SHIFT, step=step, zero_code=zero_code)
    values, codes = quantizer(x), quantizer.encode(x)
    assert quantizer.n_codes == 2**bits + (zero_code == "extra")
    for row, value, code in zip(x, values, codes, strict=True):
        scale = clip * (row.max() + SHIFT)
        alone = LogQuantizer(bits, scale, SHIFT, SHIFT, step=step, zero_code=zero_code)
        torch.testing.assert_close(value, alone(row), rtol=1e-6, atol=1e-6 * float(scale))
        assert float((code == alone.encode(row)).float().mean()) > 0.97  # borders apart


@widths
@bases
def test_the_largest_of_a_whole_range_is_kept_and_zero_too(bits: int, step: int) -> None:
    x = shares(6, 40)
    x[:, 3] = 0
    values = TokenLogQuantizer(bits, torch.ones(1), torch.zeros(1), step=step)(x)
    torch.testing.assert_close(values.amax(1), x.amax(1))
    assert bool((values[:, 3] <= 1e-14).all())
    # a power of two changes no digit
    again = TokenLogQuantizer(bits, torch.ones(1), torch.zeros(1), step=step)(x / 8)
    assert torch.equal(again, values / 8)


@widths
def test_logarithmic_tokens_on_the_other_axis_have_the_same_values(bits: int) -> None:
    x, clip = tokens(2, 3, 7, 16), torch.tensor([0.4, 0.7, 1.0])[:, None, None]
    straight = TokenLogQuantizer(bits, clip, SHIFT, step=30)
    turned = TokenLogQuantizer(bits, clip, SHIFT, step=30, axis=-2)
    assert torch.equal(turned(x.mT), straight(x).mT)
    alone = TokenLogQuantizer(bits, clip[1, 0], SHIFT, step=30)
    assert torch.equal(straight(x)[:, 1], alone(x[:, 1]))


@pytest.mark.parametrize("constant", [0.0, -0.17, -5.0, 1e-20, 1e20])
def test_tokens_without_a_range_stay_finite(constant: float) -> None:
    values = TokenLogQuantizer(3, torch.tensor([0.5]), SHIFT, step=30)(torch.full((3, 9), constant))
    assert bool(torch.isfinite(values).all())


def test_a_rebuilt_logarithmic_quantizer_gives_the_same_values() -> None:
    x = tokens(9, 30)
    quantizer = TokenLogQuantizer(3, torch.tensor([0.6]), SHIFT, step=41, axis=-2)
    again = rebuild(json.loads(json.dumps(describe(quantizer))), quantizer.state_dict())
    assert torch.equal(again(x), quantizer(x))
    assert torch.equal(again.encode(x), quantizer.encode(x))
    grid = quantizer.at(x)
    assert torch.equal(grid.decode(quantizer.encode(x)), quantizer(x))
