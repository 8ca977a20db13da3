from __future__ import annotations

import pytest
import torch

from lampq.reconstruct import precision
from lampq.reconstruct.precision import chosen, computing, fast_bfloat16


@pytest.fixture
def hardware(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """A processor whose features the test names, and no limit from outside."""
    features = {"bfloat16": True, "tiles": False}
    monkeypatch.setattr(
        precision.torch.cpu, "_is_avx512_bf16_supported", lambda: features["bfloat16"]
    )
    monkeypatch.setattr(precision.torch.cpu, "_is_amx_tile_supported", lambda: features["tiles"])
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    return features


def test_auto_is_bfloat16_where_the_processor_has_it(hardware: dict[str, bool]) -> None:
    assert chosen("auto") is torch.bfloat16
    hardware["bfloat16"] = False
    assert chosen("auto") is torch.float32


def test_tiles_have_to_be_asked_for(hardware: dict[str, bool]) -> None:
    hardware["tiles"] = True
    assert chosen("auto") is torch.float32
    assert chosen("bfloat16") is torch.bfloat16


@pytest.mark.parametrize(
    ("limit", "fast"),
    [
        ("AVX512_CORE_VNNI", False),
        ("AVX2", False),
        ("AVX512_CORE_BF16", True),
        ("avx512_core_amx", True),
        ("ALL", True),
    ],
)
@pytest.mark.usefixtures("hardware")
def test_a_limit_of_the_instructions_is_heeded(
    monkeypatch: pytest.MonkeyPatch, limit: str, fast: bool
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert fast_bfloat16() is fast


@pytest.mark.usefixtures("hardware")
def test_an_older_torch_computes_in_single_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(precision.torch.cpu, "_is_avx512_bf16_supported")
    assert chosen("auto") is torch.float32


def test_the_context_is_entered_for_bfloat16_only() -> None:
    with computing("float32"):
        assert not torch.is_autocast_enabled("cpu")
    with computing("bfloat16"):
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16
