"""Values as they are typed on the command line."""

from __future__ import annotations

from typing import Any, TypeVar

from typer.core import TyperCommand

from lampq.data import Preprocessing
from lampq.errors import ConfigError
from lampq.reconstruct import DEFAULT

T = TypeVar("T")


class OptionalName(TyperCommand):
    """A command whose --reconstruct may stand without a name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The arguments, with the default name where none is given."""
        filled = []
        for number, word in enumerate(args):
            filled.append(word)
            alone = number + 1 == len(args) or args[number + 1].startswith("-")
            if word == "--reconstruct" and alone:
                filled.append(DEFAULT)
        return super().parse_args(ctx, filled)


def names(text: str | None, option: str) -> tuple[str, ...]:
    """Names with commas between; none if nothing was typed."""
    if text is None:
        return ()
    found = tuple(part.strip() for part in text.split(","))
    if not all(found):
        raise ConfigError(f"{option} must be names with commas between, got {text!r}")
    return found


def numbers(text: str | None, name: str, kind: type[T]) -> tuple[T, ...] | None:
    """Numbers with commas between."""
    if text is None:
        return None
    try:
        return tuple(kind(part) for part in text.split(","))  # type: ignore[call-arg]
    except ValueError:
        raise ConfigError(f"{name} must be numbers with commas between, got {text!r}") from None


def width(text: str | None) -> str | int | None:
    """A width, or a word for one."""
    return int(text) if text is not None and text.isdigit() else text


def height_and_width(text: str | None) -> tuple[int, int] | None:
    """A size like 800x1344."""
    if text is None:
        return None
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
        raise ConfigError(f"size must be height x width like 800x1344, got {text!r}")
    return int(parts[0]), int(parts[1])


SIZES = {
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "b": 1,
    "": 1,
}
COUNTS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "": 1}


def size_in_bytes(text: str | None) -> int | None:
    """A size with or without a unit."""
    return _with_unit(text, SIZES, "target-size must be like 3.5MB or 2000000")


def bit_operations(text: str | None) -> int | None:
    """A number of operations with or without a unit."""
    return _with_unit(text, COUNTS, "target-bops must be like 20G or 20000000000")


def _with_unit(text: str | None, units: dict[str, int], expected: str) -> int | None:
    if text is None:
        return None
    number = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = text[len(number) :].strip().lower()
    try:
        return int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):
        raise ConfigError(f"{expected}, got {text!r}") from None


def preprocessing_with(
    own: Preprocessing, mean: str | None, std: str | None, crop_pct: float | None
) -> Preprocessing:
    """The model's own preprocessing, with what was typed instead."""

    def stretched(
        values: tuple[float, ...] | None, fallback: tuple[float, ...]
    ) -> tuple[float, ...]:
        if values is None:
            return fallback
        if len(values) not in (1, len(fallback)):
            raise ConfigError(f"the model has {len(fallback)} channels, got {len(values)} numbers")
        return values * len(fallback) if len(values) == 1 else values

    return Preprocessing(
        mean=stretched(numbers(mean, "mean", float), own.mean),
        std=stretched(numbers(std, "std", float), own.std),
        crop_pct=own.crop_pct if crop_pct is None else crop_pct,
        size=own.size,
        recrop=own.recrop if crop_pct is None else True,
    )
