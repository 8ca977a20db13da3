"""Codes of 1 to 10 bits to bytes and back."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lampq.errors import FormatError


def packed_size(count: int, bits: int) -> int:
    """Bytes that ``count`` codes take."""
    return (count * bits + 7) // 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes one after the other, lowest bit first, without gaps."""
    if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < 2**bits:
        wrong = int(codes.min()) if int(codes.min()) < 0 else int(codes.max())
        raise FormatError(f"code {wrong} does not fit into {bits} bits")
    values = codes.flatten().cpu().numpy().astype("u1" if bits <= 8 else "<u2")
    octets = values.view(np.uint8).reshape(len(values), values.itemsize)
    wide = np.unpackbits(octets, axis=1, bitorder="little")[:, :bits]
    return torch.from_numpy(np.packbits(wide.ravel(), bitorder="little"))


def unpack(packed: Tensor, bits: int, shape: tuple[int, ...]) -> Tensor:
    """The codes that ``pack`` was given, in the smallest type that holds them."""
    count = int(np.prod(shape, dtype=np.int64))
    if packed.dtype != torch.uint8 or packed.numel() != packed_size(count, bits):
        raise FormatError(
            f"{count} codes of {bits} bits take {packed_size(count, bits)} bytes, "
            f"found {packed.numel()} values of {packed.dtype}"
        )
    if bits <= 8:
        return torch.from_numpy(_narrow(packed.numpy(), bits, count).reshape(shape))
    stream = np.unpackbits(packed.numpy(), bitorder="little", count=count * bits)
    octets = np.packbits(stream.reshape(count, bits), axis=1, bitorder="little")
    return torch.from_numpy(octets.view("<u2").astype(np.int16).reshape(shape))


def _narrow(octets: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.uint8]:
    """Codes of at most eight bits: eight of them are so many bytes, and fit into one word."""
    groups = -(-count // 8)
    whole = np.zeros(groups * bits, dtype=np.uint8)
    whole[: len(octets)] = octets
    words = np.zeros((groups, 8), dtype=np.uint8)
    words[:, :bits] = whole.reshape(groups, bits)
    word = words.view("<u8")[:, 0]
    codes = np.empty((groups, 8), dtype=np.uint8)
    for place in range(8):
        codes[:, place] = (word >> np.uint64(place * bits)) & np.uint64(2**bits - 1)
    return codes.reshape(-1)[:count]
