from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lampq.quant.fold import NormFold, absorb_shift
from lampq.quant.log import LogQuantizer
from lampq.quant.uniform import UniformQuantizer

CHANNELS, OUTPUTS = 12, 7


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def x(generator: torch.Generator) -> Tensor:
    """Tokens with channels of very different sizes."""
    sizes = torch.logspace(-2, 2, CHANNELS, dtype=torch.float64)
    return torch.randn(50, CHANNELS, generator=generator, dtype=torch.float64) * sizes


@pytest.fixture
def fold(generator: torch.Generator) -> NormFold:
    draw = torch.rand(2, CHANNELS, generator=generator, dtype=torch.float64)
    return NormFold(ratio=draw[0] * 3 + 0.1, shift=draw[1] * 4 - 2)


@pytest.fixture
def norm(generator: torch.Generator) -> nn.LayerNorm:
    layer = nn.LayerNorm(CHANNELS, dtype=torch.float64)
    layer.weight.data.copy_(torch.randn(CHANNELS, generator=generator))
    layer.bias.data.copy_(torch.randn(CHANNELS, generator=generator))
    return layer


@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no-bias"])
def test_folding_leaves_the_float_function_unchanged(
    x: Tensor, fold: NormFold, norm: nn.LayerNorm, generator: torch.Generator, with_bias: bool
) -> None:
    weight = torch.randn(OUTPUTS, CHANNELS, generator=generator, dtype=torch.float64)
    bias = torch.randn(OUTPUTS, generator=generator, dtype=torch.float64)
    if not with_bias:
        bias = torch.zeros_like(bias)
    before = F.linear(norm(x), weight, bias if with_bias else None)
    folded = F.layer_norm(x, (CHANNELS,), *fold.of_norm(norm.weight, norm.bias), norm.eps)
    after = F.linear(folded, *fold.of_linear(weight, bias))
    torch.testing.assert_close(after, before, rtol=1e-10, atol=1e-10)


def test_the_folded_norm_gives_the_folded_inputs(
    x: Tensor, fold: NormFold, norm: nn.LayerNorm
) -> None:
    folded = F.layer_norm(x, (CHANNELS,), *fold.of_norm(norm.weight, norm.bias), norm.eps)
    torch.testing.assert_close(folded, fold.of_inputs(norm(x)), rtol=1e-10, atol=1e-10)


def test_folding_writes_into_no_tensor(
    fold: NormFold, norm: nn.LayerNorm, generator: torch.Generator
) -> None:
    weight = torch.randn(OUTPUTS, CHANNELS, generator=generator, dtype=torch.float64)
    bias = torch.zeros(OUTPUTS, dtype=torch.float64)
    given = [weight, bias, norm.weight.data, norm.bias.data, fold.ratio, fold.shift]
    before = [tensor.clone() for tensor in given]
    fold.of_linear(weight, bias)
    fold.of_norm(norm.weight, norm.bias)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


@pytest.mark.parametrize("bits", range(1, 9))
def test_one_grid_for_all_channels_gives_the_codes_of_a_grid_per_channel(
    x: Tensor, bits: int
) -> None:
    own = UniformQuantizer.between(bits, x.amin(0), x.amax(0), whole=True)
    to_scale, to_zero = own.scale.mean(), own.zero.mean().round()
    fold = NormFold.between(own.scale, own.zero, to_scale, to_zero)
    common = UniformQuantizer(bits, to_scale, to_zero)
    assert torch.equal(common.encode(fold.of_inputs(x)), own.encode(x))


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_folded_values_mean_the_same_as_those_of_a_grid_per_channel(
    x: Tensor, bits: int
) -> None:
    own = UniformQuantizer.between(bits, x.amin(0), x.amax(0), whole=True)
    to_scale, to_zero = own.scale.mean(), own.zero.mean().round()
    fold = NormFold.between(own.scale, own.zero, to_scale, to_zero)
    common = UniformQuantizer(bits, to_scale, to_zero)
    unfolded = (common(fold.of_inputs(x)) + fold.shift) * fold.ratio
    torch.testing.assert_close(unfolded, own(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("bits", [1, 3, 8])
def test_the_whole_of_the_scales_is_the_fold_between_grids(x: Tensor, bits: int) -> None:
    own = UniformQuantizer.between(bits, x.amin(0), x.amax(0), whole=True)
    whole = NormFold.partly(own.scale, own.zero, 1.0, 2**bits - 1)
    known = NormFold.between(own.scale, own.zero, own.scale.mean(), own.zero.mean().round())
    torch.testing.assert_close(whole.ratio, known.ratio)
    torch.testing.assert_close(whole.shift, known.shift)


@pytest.mark.parametrize("power", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_a_part_of_the_scales_leaves_the_rest_and_aligns_the_middles(power: float) -> None:
    low, high = torch.tensor([-1.0, -10.0, 3.0]), torch.tensor([1.0, 90.0, 4.0])
    scale, zero = (high - low) / 15, -low / (high - low) * 15
    fold = NormFold.partly(scale, zero, power, 15)
    ends = torch.stack([fold.of_inputs(low), fold.of_inputs(high)])
    torch.testing.assert_close(ends.mean(dim=0), ends.mean().expand(3), rtol=1e-4, atol=1e-4)
    spans = (ends[1] - ends[0]).log()
    left = (high - low).log() * (1 - power)
    torch.testing.assert_close(spans - spans[0], left - left[0], rtol=1e-4, atol=1e-4)


def test_the_bias_absorbs_a_shift_of_the_input(x: Tensor, generator: torch.Generator) -> None:
    weight = torch.randn(OUTPUTS, CHANNELS, generator=generator, dtype=torch.float64)
    bias = torch.randn(OUTPUTS, generator=generator, dtype=torch.float64)
    shift = torch.tensor([0.17], dtype=torch.float64)
    moved = F.linear(x + shift, weight, absorb_shift(bias, weight, shift))
    torch.testing.assert_close(moved, F.linear(x, weight, bias), rtol=1e-10, atol=1e-10)


def test_a_log_input_without_offset_needs_only_the_absorbed_bias(
    x: Tensor, generator: torch.Generator
) -> None:
    weight = torch.randn(OUTPUTS, CHANNELS, generator=generator, dtype=torch.float64)
    bias = torch.randn(OUTPUTS, generator=generator, dtype=torch.float64)
    scale, shift = (torch.tensor([v], dtype=torch.float64) for v in (2.0, 0.17))
    whole = LogQuantizer(4, scale, shift, shift, step=20)
    bare = LogQuantizer(4, scale, shift, torch.zeros_like(shift), step=20)
    expected = F.linear(whole(x), weight, bias)
    absorbed = F.linear(bare(x), weight, absorb_shift(bias, weight, shift))
    torch.testing.assert_close(absorbed, expected, rtol=1e-10, atol=1e-10)
