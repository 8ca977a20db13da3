from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lampq.quant.base import describe, rebuild
from lampq.quant.uniform import UniformQuantizer, uniform_round

BITS = st.integers(1, 8)
WHOLE = st.booleans()


@st.composite
def ranges(draw: st.DrawFn, *, around_zero: bool = False) -> tuple[Tensor, Tensor]:
    """Lower and upper bound, not closer to each other than single precision can tell apart."""
    span = draw(st.floats(0.01, 100))
    low = -span * draw(st.floats(0, 1)) if around_zero else draw(st.floats(-10, 10))
    return torch.tensor(low), torch.tensor(low) + span


def values(limit: float = 1e3) -> st.SearchStrategy[Tensor]:
    """A vector of floats."""
    numbers = st.floats(-limit, limit, width=32, allow_subnormal=False)
    return st.lists(numbers, min_size=1, max_size=20).map(torch.tensor)


@given(bits=BITS, bounds=ranges(), whole=WHOLE, x=values(2.0**100))
def test_codes_are_in_range_for_every_finite_input(
    bits: int, bounds: tuple[Tensor, Tensor], whole: bool, x: Tensor
) -> None:
    codes = UniformQuantizer.between(bits, *bounds, whole=whole).encode(x)
    assert codes.dtype == torch.int32
    assert codes.shape == x.shape
    assert int(codes.min()) >= 0
    assert int(codes.max()) < 2**bits


@given(bits=BITS, bounds=ranges(), whole=WHOLE, x=values())
def test_quantizing_twice_is_quantizing_once(
    bits: int, bounds: tuple[Tensor, Tensor], whole: bool, x: Tensor
) -> None:
    quantizer = UniformQuantizer.between(bits, *bounds, whole=whole)
    assert torch.equal(quantizer(quantizer(x)), quantizer(x))


@given(bits=BITS, bounds=ranges(), whole=WHOLE, share=st.floats(0, 1))
def test_the_error_is_at_most_half_a_step_inside_the_range(
    bits: int, bounds: tuple[Tensor, Tensor], whole: bool, share: float
) -> None:
    low, high = (bound.double() for bound in bounds)
    quantizer = UniformQuantizer.between(bits, low, high, whole=whole)
    first, last = quantizer.decode(torch.tensor([0, 2**bits - 1]))
    x = first + share * (last - first)
    assert float((quantizer(x) - x).abs()) <= float(quantizer.scale) * (0.5 + 1e-9)


@given(bits=BITS, bounds=ranges())
def test_a_real_zero_point_reaches_both_bounds(bits: int, bounds: tuple[Tensor, Tensor]) -> None:
    low, high = (bound.double() for bound in bounds)
    quantizer = UniformQuantizer.between(bits, low, high, whole=False)
    torch.testing.assert_close(
        quantizer.decode(torch.tensor([0, 2**bits - 1])), torch.stack([low, high])
    )


@given(bits=BITS, bounds=ranges(), whole=WHOLE)
def test_there_are_at_most_two_to_the_bits_values(
    bits: int, bounds: tuple[Tensor, Tensor], whole: bool
) -> None:
    low, high = bounds
    quantizer = UniformQuantizer.between(bits, low, high, whole=whole)
    assert quantizer.n_codes == 2**bits
    x = torch.linspace(-1, 2, 3000) * (high - low) + low
    assert len(quantizer(x).unique()) <= 2**bits


@given(bits=BITS, bounds=ranges(around_zero=True))
def test_zero_is_exact_with_a_whole_zero_point(bits: int, bounds: tuple[Tensor, Tensor]) -> None:
    quantizer = UniformQuantizer.between(bits, *bounds, whole=True)
    assert float(quantizer(torch.zeros(()))) == 0.0


@given(bits=BITS, bounds=ranges(), whole=WHOLE, x=values())
def test_a_larger_input_never_gives_a_smaller_value(
    bits: int, bounds: tuple[Tensor, Tensor], whole: bool, x: Tensor
) -> None:
    quantizer = UniformQuantizer.between(bits, *bounds, whole=whole)
    assert bool((quantizer(x.sort().values).diff() >= 0).all())


@given(bits=BITS, bounds=ranges(), whole=WHOLE, x=values())
def test_decoded_codes_are_the_forward_pass_bit_for_bit(
    bits: int, bounds: tuple[Tensor, Tensor], whole: bool, x: Tensor
) -> None:
    quantizer = UniformQuantizer.between(bits, *bounds, whole=whole)
    assert torch.equal(quantizer.decode(quantizer.encode(x)), quantizer(x))


@given(bits=BITS, bounds=ranges(), whole=WHOLE, x=values())
def test_a_rebuilt_quantizer_is_bit_exact(
    bits: int, bounds: tuple[Tensor, Tensor], whole: bool, x: Tensor
) -> None:
    quantizer = UniformQuantizer.between(bits, *bounds, whole=whole)
    header = json.loads(json.dumps(describe(quantizer)))
    again = rebuild(header, quantizer.state_dict())
    assert torch.equal(again.encode(x), quantizer.encode(x))
    assert torch.equal(again(x), quantizer(x))


def test_codes_and_values_by_hand() -> None:
    # scale (3 - -1) / 3 and zero point round(0.75) = 1: the grid is -4/3, 0, 4/3, 8/3
    quantizer = UniformQuantizer.between(2, torch.tensor(-1.0), torch.tensor(3.0), whole=True)
    x = torch.tensor([-9.0, -0.7, 0.0, 0.6, 0.7, 2.0, 2.1, 9.0])
    assert quantizer.encode(x).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    expected = torch.tensor([-4, -4, 0, 0, 4, 4, 8, 8]) / 3
    torch.testing.assert_close(quantizer(x), expected)


def test_one_bit_between_bounds_is_the_pair_of_them() -> None:
    quantizer = UniformQuantizer.between(1, torch.tensor(-2.0), torch.tensor(3.0), whole=False)
    torch.testing.assert_close(
        quantizer(torch.tensor([-5.0, 0.4, 0.6, 9.0])), torch.tensor([-2.0, -2.0, 3.0, 3.0])
    )


@given(bits=BITS, whole=WHOLE)
def test_each_channel_is_quantized_as_if_it_were_alone(bits: int, whole: bool) -> None:
    x = (
        torch.randn(5, 30, generator=torch.Generator().manual_seed(bits))
        * torch.arange(1, 6)[:, None]
    )
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    together = UniformQuantizer.between(bits, low, high, whole=whole)(x)
    for row, alone in enumerate(x):
        single = UniformQuantizer.between(bits, low[row], high[row], whole=whole)
        assert torch.equal(together[row], single(alone))


@pytest.mark.parametrize("constant", [0.0, 0.3, -7.0, 1e-30])
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "real"])
def test_a_range_without_width_keeps_its_only_value(constant: float, whole: bool) -> None:
    bound = torch.tensor(constant)
    quantizer = UniformQuantizer.between(4, bound, bound, whole=whole)
    torch.testing.assert_close(quantizer(bound), bound)


@pytest.mark.parametrize("gradient", [False, True], ids=["plain", "gradient"])
def test_rounding_leaves_its_input_alone(gradient: bool) -> None:
    x = torch.linspace(-2, 2, 9).requires_grad_(gradient)
    before = x.detach().clone()
    codes = uniform_round(x, torch.tensor(0.5), torch.tensor(2.0), 2)
    assert torch.equal(x.detach(), before)
    assert codes.tolist() == [0, 0, 0, 1, 2, 3, 3, 3, 3]
