from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lampq.errors import FormatError
from lampq.quant.base import describe, rebuild
from lampq.quant.log import DENOMINATOR, LogQuantizer, ZeroCode, log_levels

BITS = st.integers(1, 8)
STEPS = st.integers(10, 137)
SCALES = st.floats(0.01, 100)
ZERO_CODES = st.sampled_from(["extra", "reserved"])


def _adaptive(
    bits: int,
    scale: float,
    step: int,
    *,
    shift: float = 0.0,
    table: bool = True,
    zero_code: ZeroCode = "extra",
    dtype: torch.dtype = torch.float32,
) -> LogQuantizer:
    moved = torch.tensor([shift], dtype=dtype)
    factor = torch.tensor([scale], dtype=dtype)
    return LogQuantizer(bits, factor, moved, moved, step=step, table=table, zero_code=zero_code)


@st.composite
def quantizers(draw: st.DrawFn) -> LogQuantizer:
    """Any logarithmic quantizer whose offset equals its shift."""
    return _adaptive(
        draw(BITS),
        draw(SCALES),
        draw(STEPS),
        shift=draw(st.sampled_from([0.0, 0.17])),
        table=draw(st.booleans()),
        zero_code=draw(ZERO_CODES),
    )


def values(limit: float = 1e3) -> st.SearchStrategy[Tensor]:
    """A vector of floats of both signs and of all sizes."""
    numbers = st.floats(-limit, limit, width=32, allow_subnormal=False)
    small = st.floats(2**-30, 1, width=32)
    return st.lists(numbers | small, min_size=1, max_size=20).map(torch.tensor)


@given(quantizer=quantizers(), x=values(2.0**100))
def test_codes_are_in_range_for_every_finite_input(quantizer: LogQuantizer, x: Tensor) -> None:
    codes = quantizer.encode(x)
    assert codes.dtype == torch.int32
    assert codes.shape == x.shape
    assert int(codes.min()) >= 0
    assert int(codes.max()) < quantizer.n_codes


@pytest.mark.parametrize("table", [True, False], ids=["table", "powers"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_quantizing_twice_is_quantizing_once(bits: int, table: bool) -> None:
    for step in range(10, 138):
        quantizer = _adaptive(bits, 2.0, step, table=table)
        once = quantizer(2.0 * torch.exp2(torch.linspace(-40, 0, 2000)))
        torch.testing.assert_close(
            quantizer(once), once, rtol=1e-6, atol=1e-12, msg=lambda m, s=step: f"step {s}: {m}"
        )


@given(bits=BITS, step=STEPS, x=values())
def test_quantizing_twice_is_quantizing_once_with_a_shift(bits: int, step: int, x: Tensor) -> None:
    quantizer = _adaptive(bits, 2.0, step, shift=0.17, table=False)
    once = quantizer(x)
    # powers below the resolution of the shift are lost when it is taken off again
    torch.testing.assert_close(quantizer(once), once, rtol=1e-6, atol=1e-7)


@given(bits=BITS, scale=SCALES, step=STEPS, zero_code=ZERO_CODES, share=st.floats(0, 1))
def test_the_error_is_at_most_half_a_step_of_the_logarithm_inside_the_range(
    bits: int, scale: float, step: int, zero_code: ZeroCode, share: float
) -> None:
    quantizer = _adaptive(bits, scale, step, table=False, zero_code=zero_code, dtype=torch.float64)
    powers = 2**bits - (zero_code == "reserved")
    lowest = min((powers - 1) * step / DENOMINATOR, 40.0)
    x = scale * torch.exp2(-torch.tensor([share * lowest], dtype=torch.float64))
    distance = (quantizer(x).log2() - x.log2()).abs()
    assert float(distance) <= step / DENOMINATOR * (0.5 + 1e-9)


@given(quantizer=quantizers())
def test_there_are_no_more_values_than_codes(quantizer: LogQuantizer) -> None:
    positive = torch.exp2(torch.linspace(-60, 1, 4000)) * quantizer.scale
    x = torch.cat([positive - quantizer.shift, torch.tensor([-1.0, 0.0])])
    assert len(quantizer(x).unique()) <= quantizer.n_codes


@given(bits=BITS, step=STEPS, table=st.booleans())
def test_a_reserved_zero_keeps_within_two_to_the_bits_values(
    bits: int, step: int, table: bool
) -> None:
    quantizer = _adaptive(bits, 1.0, step, table=table, zero_code="reserved")
    x = torch.cat([torch.exp2(torch.linspace(-60, 1, 4000)), torch.tensor([-1.0, 0.0])])
    assert quantizer.n_codes == 2**bits
    assert len(quantizer(x).unique()) <= 2**bits


@pytest.mark.parametrize("bits", range(1, 6))
def test_an_extra_zero_is_one_value_more(bits: int) -> None:
    x = torch.cat([torch.exp2(torch.linspace(-60, 1, 4000)), torch.tensor([0.0])])
    values = LogQuantizer.log2(bits, torch.ones(1))(x).unique()
    assert len(values) == 2**bits + 1
    assert float(values[0]) == 0.0


@given(bits=BITS, scale=SCALES, table=st.booleans(), zero_code=ZERO_CODES, x=values())
def test_a_step_of_the_whole_denominator_is_log2(
    bits: int, scale: float, table: bool, zero_code: ZeroCode, x: Tensor
) -> None:
    adaptive = _adaptive(bits, scale, DENOMINATOR, table=table, zero_code=zero_code)
    plain = LogQuantizer.log2(bits, torch.tensor([scale]), zero_code)
    assert torch.equal(adaptive.encode(x), plain.encode(x))
    assert torch.equal(adaptive(x), plain(x))


@given(bits=st.integers(1, 5), step=st.integers(37, 50), zero_code=ZERO_CODES)
def test_an_input_beyond_the_last_power_becomes_zero(
    bits: int, step: int, zero_code: ZeroCode
) -> None:
    quantizer = _adaptive(bits, 4.0, step, zero_code=zero_code)
    powers = 2**bits - (zero_code == "reserved")
    exponent = torch.tensor([(powers - 0.4) * step / DENOMINATOR])
    assert float(quantizer(4.0 * torch.exp2(-exponent))) == 0.0


@given(bits=BITS, step=STEPS, zero_code=ZERO_CODES)
def test_an_input_of_zero_becomes_as_good_as_zero(
    bits: int, step: int, zero_code: ZeroCode
) -> None:
    value = float(_adaptive(bits, 1.0, step, zero_code=zero_code)(torch.zeros(1)))
    # the logarithm is taken of 1e-15 at least; the code next to that is less than a step away
    assert 0 <= value <= 1e-15 * 2 ** (step / DENOMINATOR / 2)


@given(quantizer=quantizers(), x=values())
def test_a_larger_input_never_gives_a_smaller_value(quantizer: LogQuantizer, x: Tensor) -> None:
    assert bool((quantizer(x.sort().values).diff() >= 0).all())


@given(quantizer=quantizers(), x=values())
def test_decoded_codes_are_the_forward_pass_bit_for_bit(quantizer: LogQuantizer, x: Tensor) -> None:
    assert torch.equal(quantizer.decode(quantizer.encode(x)), quantizer(x))


@given(quantizer=quantizers(), x=values())
def test_a_rebuilt_quantizer_is_bit_exact(quantizer: LogQuantizer, x: Tensor) -> None:
    header = json.loads(json.dumps(describe(quantizer)))
    again = rebuild(header, quantizer.state_dict())
    assert again.n_codes == quantizer.n_codes
    assert torch.equal(again.encode(x), quantizer.encode(x))
    assert torch.equal(again(x), quantizer(x))


@given(quantizer=quantizers(), x=values())
def test_quantizing_leaves_its_input_alone(quantizer: LogQuantizer, x: Tensor) -> None:
    before = x.clone()
    quantizer(x)
    assert torch.equal(x, before)


def test_powers_of_two_by_hand() -> None:
    quantizer = LogQuantizer.log2(2, torch.tensor([2.0]))
    x = torch.tensor([9.0, 2.0, 1.5, 1.4, 0.5, 0.25, 0.17, -1.0])
    # -log2(x / 2) = -2.2, 0, 0.42, 0.51, 2, 3, 3.6, none; code 4 is the extra zero
    assert quantizer.encode(x).tolist() == [0, 0, 0, 1, 2, 3, 4, 4]
    assert quantizer(x).tolist() == [2.0, 2.0, 2.0, 1.0, 0.5, 0.25, 0.0, 0.0]


def test_a_reserved_zero_takes_the_last_power_by_hand() -> None:
    quantizer = LogQuantizer.log2(2, torch.tensor([2.0]), "reserved")
    assert quantizer(torch.tensor([2.0, 1.0, 0.5, 0.25])).tolist() == [2.0, 1.0, 0.5, 0.0]


def test_powers_of_the_root_of_two_by_hand() -> None:
    quantizer = LogQuantizer.log_sqrt2(3, torch.tensor([1.0]))
    x = torch.tensor([1.0, 0.5**0.5, 0.5, 0.125])
    assert quantizer.encode(x).tolist() == [0, 1, 2, 6]
    torch.testing.assert_close(quantizer(x), x)


@given(bits=BITS, step=STEPS)
def test_the_table_is_off_by_half_a_fixed_point_unit_at_most(bits: int, step: int) -> None:
    exponents = torch.arange(2**bits).double() * step / DENOMINATOR
    unit = 1 / (2 ** (bits + 1) - 2)
    error = (log_levels(bits, step, DENOMINATOR, table=True) - torch.exp2(-exponents)).abs()
    assert bool((error <= torch.exp2(-exponents.floor()) * unit * (0.5 + 1e-9)).all())


@given(bits=BITS, step=STEPS)
def test_the_table_holds_whole_multiples_of_its_unit(bits: int, step: int) -> None:
    exponents = torch.arange(2**bits).double() * step / DENOMINATOR
    mantissas = log_levels(bits, step, DENOMINATOR, table=True) * torch.exp2(exponents.floor())
    units = mantissas * max(14, 2 ** (bits + 1) - 2)
    torch.testing.assert_close(units, units.round(), rtol=0, atol=1e-9)


@given(bits=BITS, step=STEPS, x=values())
def test_without_its_offset_the_value_arrives_larger_by_the_shift(
    bits: int, step: int, x: Tensor
) -> None:
    scale, shift = torch.tensor([3.0]), torch.tensor([0.17])
    whole = LogQuantizer(bits, scale, shift, shift, step=step)
    absorbed = LogQuantizer(bits, scale, shift, torch.zeros(1), step=step)
    assert torch.equal(whole.encode(x), absorbed.encode(x))
    torch.testing.assert_close(absorbed(x) - shift, whole(x))


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(FormatError, match=r"unknown quantizer kind 'cubic'; known: log, .*uniform"):
        rebuild({"kind": "cubic", "bits": 4}, {})


@pytest.mark.parametrize("kind", ["log", "uniform"])
def test_a_quantizer_without_its_tensors_is_refused_by_kind(kind: str) -> None:
    with pytest.raises(FormatError, match=f"quantizer '{kind}' cannot be rebuilt"):
        rebuild({"kind": kind, "bits": 4}, {})
