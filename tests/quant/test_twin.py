from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lampq.quant.base import Quantizer, describe, rebuild
from lampq.quant.twin import TwinGeluQuantizer, TwinSoftmaxQuantizer

BITS = st.integers(1, 8)
widths = pytest.mark.parametrize("bits", range(1, 9))


def _softmax(bits: int, split: float) -> TwinSoftmaxQuantizer:
    return TwinSoftmaxQuantizer.splitting(bits, torch.tensor(split))


def _gelu(bits: int, high: float) -> TwinGeluQuantizer:
    return TwinGeluQuantizer.reaching(bits, torch.tensor(0.17), torch.tensor(high))


quantizers = st.one_of(
    st.builds(_softmax, BITS, st.integers(0, 19).map(lambda i: 2.0**-i)),
    st.builds(_gelu, BITS, st.floats(1e-3, 10)),
)
values = st.lists(
    st.floats(-1e3, 1e3, width=32) | st.floats(0, 1, width=32), min_size=1, max_size=20
).map(torch.tensor)


def _levels(quantizer: Quantizer) -> Tensor:
    """The values of all codes."""
    return quantizer.decode(torch.arange(quantizer.n_codes)).unique()


@given(quantizer=quantizers, x=values)
def test_codes_are_in_range_for_every_finite_input(quantizer: Quantizer, x: Tensor) -> None:
    codes = quantizer.encode(x)
    assert quantizer.n_codes == 2**quantizer.bits
    assert codes.dtype == torch.int32
    assert 0 <= int(codes.min()) <= int(codes.max()) < quantizer.n_codes
    assert bool(torch.isfinite(quantizer(x)).all())


@given(quantizer=quantizers, x=values)
def test_quantizing_twice_is_quantizing_once(quantizer: Quantizer, x: Tensor) -> None:
    once = quantizer(x)
    assert torch.equal(quantizer(once), once)


@given(quantizer=quantizers, x=values)
def test_a_larger_input_never_gives_a_smaller_value(quantizer: Quantizer, x: Tensor) -> None:
    assert bool((quantizer(x.sort().values).diff() >= 0).all())


@given(quantizer=quantizers, x=values)
def test_every_input_goes_to_the_nearest_value_that_there_is(
    quantizer: Quantizer, x: Tensor
) -> None:
    distance = (x[:, None] - _levels(quantizer)).abs().amin(dim=1)
    torch.testing.assert_close((quantizer(x) - x).abs(), distance, rtol=1e-5, atol=1e-7)


@given(quantizer=quantizers)
def test_zero_is_exact_and_there_are_no_more_values_than_codes(quantizer: Quantizer) -> None:
    assert float(quantizer(torch.zeros(1))) == 0.0
    assert len(_levels(quantizer)) <= 2**quantizer.bits


@given(quantizer=quantizers, x=values)
def test_decoded_codes_are_the_forward_pass_bit_for_bit(quantizer: Quantizer, x: Tensor) -> None:
    assert torch.equal(quantizer.decode(quantizer.encode(x)), quantizer(x))


@given(quantizer=quantizers, x=values)
def test_a_rebuilt_quantizer_is_bit_exact(quantizer: Quantizer, x: Tensor) -> None:
    header = json.loads(json.dumps(describe(quantizer)))
    again = rebuild(header, quantizer.state_dict())
    assert torch.equal(again.encode(x), quantizer.encode(x))
    assert torch.equal(again(x), quantizer(x))


def test_a_fine_and_a_coarse_grid_by_hand() -> None:
    # four values each: multiples of 1/12 up to 1/4, and of 1/3 beyond
    quantizer = _softmax(3, 0.25)
    x = torch.tensor([0.0, 0.04, 0.05, 0.2, 0.25, 0.29, 0.3, 0.6, 1.0, 7.0, -1.0])
    third, twelfth = 1 / 3, 1 / 12
    expected = [0, 0, twelfth, 2 * twelfth, 0.25, 0.25, third, 2 * third, 1, 1, 0]
    torch.testing.assert_close(quantizer(x), torch.tensor(expected))
    assert quantizer.encode(x).tolist() == [0, 0, 1, 2, 3, 3, 5, 6, 7, 7, 0]


def test_large_values_are_not_lifted_by_the_fine_range() -> None:
    quantizer = _softmax(4, 0.5)
    assert float(quantizer(torch.tensor(6 / 7))) == pytest.approx(6 / 7)


@widths
def test_the_largest_softmax_value_is_exact(bits: int) -> None:
    assert float(_softmax(bits, 1.0)(torch.tensor(1.0))) == 1.0


def test_one_bit_keeps_the_split_and_zero() -> None:
    values = _softmax(1, 0.25)(torch.tensor([0.0, 0.1, 0.2, 1.0]))
    assert values.tolist() == [0.0, 0.0, 0.25, 0.25]


def test_negative_and_positive_steps_by_hand() -> None:
    # four negative steps of 0.0425, three positive ones of 0.5
    quantizer = _gelu(3, 0.5)
    x = torch.tensor([-9.0, -0.17, -0.05, -0.02, 0.0, 0.2, 0.3, 1.1, 9.0])
    expected = [-0.17, -0.17, -0.0425, 0.0, 0.0, 0.0, 0.5, 1.0, 1.5]
    torch.testing.assert_close(quantizer(x), torch.tensor(expected))
    assert quantizer.encode(x).tolist() == [0, 0, 3, 4, 4, 4, 5, 6, 7]


def test_one_bit_of_a_gelu_is_zero_and_one_step() -> None:
    assert _gelu(1, 0.5)(torch.tensor([-1.0, 0.1, 0.4, 3.0])).tolist() == [0.0, 0.0, 0.5, 0.5]


@widths
def test_all_codes_of_a_gelu_are_used(bits: int) -> None:
    x = torch.cat([torch.linspace(-0.2, 0, 5001), torch.linspace(0, 200, 5001)])
    assert len(_gelu(bits, 0.5).encode(x).unique()) == 2**bits
