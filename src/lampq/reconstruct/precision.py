"""In which precision the passes of a training are computed; parameters stay in single precision."""

from __future__ import annotations

import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Literal, get_args

import torch

from lampq.errors import ConfigError

Precision = Literal["auto", "float32", "bfloat16"]
# how many times faster a product in bfloat16 has to be to be worth its rounding
WORTH = 1.2
# prints how many times faster; in a process of its own, as processors may name instructions that
# end it (matrix tiles inside virtual machines)
TRIAL = """
import time
import torch

torch.set_num_threads(1)
inputs, weight = torch.ones(2048, 256), torch.ones(1024, 256)


def least(kind):
    a, b, seconds = inputs.to(kind), weight.to(kind), []
    for _ in range(20):
        start = time.perf_counter()
        torch.nn.functional.linear(a, b)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


print(least(torch.float32) / least(torch.bfloat16))
"""
PATIENCE_SECONDS = 120


@cache
def gain_of_bfloat16() -> float:
    """How many times faster this machine multiplies in bfloat16, by a trial; 0 if it cannot."""
    try:
        trial = subprocess.run(
            [sys.executable, "-c", TRIAL],
            capture_output=True,
            check=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        return float(trial.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0.0


def precision_named(name: str) -> Precision:
    """The precision of that name."""
    known: tuple[Precision, ...] = get_args(Precision)
    for precision in known:
        if precision == name:
            return precision
    raise ConfigError(f"precision must be one of {', '.join(known)}, got {name!r}")


def chosen(precision: Precision) -> torch.dtype:
    """The type that a precision means on this machine."""
    if precision == "auto":
        return torch.bfloat16 if gain_of_bfloat16() >= WORTH else torch.float32
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


def computing(precision: Precision) -> AbstractContextManager[object]:
    """Passes inside the context multiply in this precision; sums and norms stay in single."""
    kind = chosen(precision)
    return nullcontext() if kind is torch.float32 else torch.autocast("cpu", dtype=kind)
