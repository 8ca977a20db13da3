from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lampq.artifact.pack import pack, packed_size, unpack
from lampq.errors import FormatError

widths = pytest.mark.parametrize("bits", range(1, 11))


@widths
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000])
def test_codes_come_back_as_they_were(bits: int, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    kind = torch.uint8 if bits <= 8 else torch.int16
    codes = torch.randint(2**bits, (count,), generator=generator, dtype=kind)
    again = unpack(pack(codes, bits), bits, (count,))
    assert again.dtype == kind
    assert torch.equal(again, codes)


@widths
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64], ids=str)
def test_the_smallest_and_the_largest_code_come_back(bits: int, dtype: torch.dtype) -> None:
    codes = torch.tensor([0, 2**bits - 1, 0, 2**bits - 1, 2**bits - 1], dtype=dtype)
    assert unpack(pack(codes, bits), bits, (5,)).tolist() == codes.tolist()


@given(bits=st.integers(1, 10), data=st.data())
def test_a_matrix_of_any_codes_comes_back(bits: int, data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 13))
    values = st.lists(st.integers(0, 2**bits - 1), min_size=rows * columns, max_size=rows * columns)
    codes = torch.tensor(data.draw(values), dtype=torch.int16).view(rows, columns)
    again = unpack(pack(codes, bits), bits, (rows, columns))
    assert again.tolist() == codes.tolist()


@widths
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000])
def test_packed_codes_take_no_more_bytes_than_their_bits_need(bits: int, count: int) -> None:
    bytes_needed = -(-count * bits // 8)
    assert pack(torch.zeros(count, dtype=torch.uint8), bits).numel() == bytes_needed
    assert packed_size(count, bits) == bytes_needed


def test_the_order_of_bits_is_lowest_first() -> None:
    # 5 = 101, 3 = 011, 6 = 110: bytes 10_011_101 and 1 from the low end up
    assert pack(torch.tensor([5, 3, 6], dtype=torch.uint8), 3).tolist() == [0b10_011_101, 0b1]


def test_codes_wider_than_a_byte_keep_that_order() -> None:
    # 514 = 10_0000_0010 and 1: bytes 0000_0010, 00_0001_10 and 0 from the low end up
    assert pack(torch.tensor([514, 1], dtype=torch.int16), 10).tolist() == [2, 0b110, 0]


def test_codes_that_are_not_contiguous_keep_their_order() -> None:
    codes = torch.arange(12, dtype=torch.uint8).view(3, 4).T
    assert torch.equal(unpack(pack(codes, 4), 4, (4, 3)), codes)


@widths
def test_a_code_that_is_too_large_is_refused(bits: int) -> None:
    with pytest.raises(FormatError, match=f"code {2**bits} does not fit into {bits} bits"):
        pack(torch.tensor([0, 2**bits], dtype=torch.int32), bits)


@widths
def test_a_negative_code_is_refused(bits: int) -> None:
    with pytest.raises(FormatError, match="does not fit"):
        pack(torch.tensor([0, -1], dtype=torch.int32), bits)


@widths
@pytest.mark.parametrize("extra", [-1, 1], ids=["short", "long"])
def test_a_wrong_number_of_bytes_is_refused(bits: int, extra: int) -> None:
    packed = torch.zeros(packed_size(100, bits) + extra, dtype=torch.uint8)
    with pytest.raises(FormatError, match=f"100 codes of {bits} bits take"):
        unpack(packed, bits, (100,))


def test_bytes_of_another_type_are_refused() -> None:
    with pytest.raises(FormatError, match=r"found 2 values of torch\.int32"):
        unpack(torch.zeros(2, dtype=torch.int32), 4, (4,))


def test_a_shape_of_another_size_is_refused() -> None:
    with pytest.raises(FormatError, match="12 codes of 4 bits take 6 bytes, found 5"):
        unpack(pack(torch.zeros(10, dtype=torch.uint8), 4), 4, (3, 4))
