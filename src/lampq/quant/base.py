"""The contract of every quantizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lampq.errors import FormatError


class Quantizer(nn.Module, ABC):
    """Maps floats to integer codes, and to what the codes stand for.

    Fitted when built, never changed after. ``kind``, ``bits``, ``options()`` and the buffers are
    the whole quantizer.
    """

    kind: ClassVar[str]
    bits: int

    @property
    def n_codes(self) -> int:
        """How many codes ``encode`` can give."""
        return int(2**self.bits)

    @abstractmethod
    def encode(self, x: Tensor) -> Tensor:
        """Integer codes in [0, n_codes), shape of x."""

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """The floats that the codes of x stand for."""

    @property
    def lift(self) -> Tensor | float:
        """How much larger a decoded value is than the input that it stands for."""
        return 0.0

    def options(self) -> dict[str, Any]:
        """What, besides bits and buffers, is needed to build the quantizer again."""
        return {}


class CodedQuantizer(Quantizer):
    """A quantizer whose codes alone give the floats back, as those of a weight must."""

    @abstractmethod
    def _round(self, x: Tensor) -> Tensor:
        """Codes as whole-numbered floats."""

    @abstractmethod
    def _value(self, codes: Tensor) -> Tensor:
        """Floats of whole-numbered float codes."""

    def encode(self, x: Tensor) -> Tensor:
        return self._round(x).int()

    def decode(self, codes: Tensor) -> Tensor:
        """The float each code stands for."""
        return self._value(codes.to(self._dtype()))

    def forward(self, x: Tensor) -> Tensor:
        """The same as ``decode(encode(x))``, without leaving floating point."""
        return self._value(self._round(x))

    def _dtype(self) -> Any:
        return next(self.buffers()).dtype


def compact(codes: Tensor, bits: int) -> Tensor:
    """Codes in the smallest type that holds them: bytes up to eight bits, then 16-bit integers."""
    return codes.to(torch.uint8 if bits <= 8 else torch.int16)


KINDS: dict[str, type[Quantizer]] = {}


def register(cls: type[Quantizer]) -> type[Quantizer]:
    """Make a quantizer loadable by its kind."""
    KINDS[cls.kind] = cls
    return cls


def describe(quantizer: Quantizer) -> dict[str, Any]:
    """Kind, bits and options, ready for a file header."""
    return {"kind": quantizer.kind, "bits": quantizer.bits, **quantizer.options()}


def rebuild(description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Quantizer:
    """The quantizer that ``describe`` and its buffers came from, with those inside it."""
    fields = dict(description)
    kind = fields.pop("kind", None)
    if kind not in KINDS:
        raise FormatError(f"unknown quantizer kind {kind!r}; known: {', '.join(sorted(KINDS))}")
    try:
        nested = {key: value for key, value in fields.items() if isinstance(value, Mapping)}
        for key, value in nested.items():
            inner = f"{key}."
            mine = {k.removeprefix(inner): v for k, v in tensors.items() if k.startswith(inner)}
            tensors = {k: v for k, v in tensors.items() if not k.startswith(inner)}
            fields[key] = rebuild(value, mine)
        return KINDS[kind](**fields, **tensors)
    except TypeError as error:
        raise FormatError(f"quantizer {kind!r} cannot be rebuilt: {error}") from error
