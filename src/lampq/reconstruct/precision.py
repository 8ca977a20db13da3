"""In which precision the passes of a training are computed; parameters stay in single precision."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

Precision = Literal["auto", "float32", "bfloat16"]
# what ONEDNN_MAX_CPU_ISA may be with bfloat16 in hardware
WITH_BFLOAT16 = ("BF16", "FP16", "AMX", "AVX10", "ALL", "DEFAULT")


def fast_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 in hardware, and surely so.

    Not where it names matrix tiles (AMX): virtual machines may name them and not have them, and the
    process would die of it. There bfloat16 has to be asked for.
    """
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "DEFAULT"))
    if not any(name in limit.upper() for name in WITH_BFLOAT16):
        return False
    try:
        return torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()
    except AttributeError:  # torch before 2.6
        return False


def chosen(precision: Precision) -> torch.dtype:
    """The type that a precision means on this machine."""
    if precision == "auto":
        return torch.bfloat16 if fast_bfloat16() else torch.float32
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


def computing(precision: Precision) -> AbstractContextManager[object]:
    """Passes inside the context multiply in this precision; sums and norms stay in single."""
    kind = chosen(precision)
    return nullcontext() if kind is torch.float32 else torch.autocast("cpu", dtype=kind)
