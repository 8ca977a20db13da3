from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lampq.reconstruct import precision
from lampq.reconstruct.precision import chosen, computing, gain_of_bfloat16


@pytest.fixture
def untried() -> Iterator[None]:
    """As in a new process, before and after."""
    gain_of_bfloat16.cache_clear()
    yield
    gain_of_bfloat16.cache_clear()


@pytest.mark.parametrize(
    ("gain", "kind"), [(6.5, torch.bfloat16), (1.1, torch.float32), (0.0, torch.float32)]
)
def test_auto_is_bfloat16_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, gain: float, kind: torch.dtype
) -> None:
    monkeypatch.setattr(precision, "gain_of_bfloat16", lambda: gain)
    assert chosen("auto") is kind
    assert chosen("bfloat16") is torch.bfloat16
    assert chosen("float32") is torch.float32


@pytest.mark.usefixtures("untried")
def test_the_gain_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gain = gain_of_bfloat16()
    assert gain > 0
    monkeypatch.setattr(precision, "TRIAL", "raise SystemExit(1)")
    assert gain_of_bfloat16() == gain


@pytest.mark.parametrize(
    "trial",
    [
        "import os, signal; os.kill(os.getpid(), signal.SIGILL)",
        "raise SystemExit(1)",
        "print('no number')",
        "import time; time.sleep(60)",
    ],
)
@pytest.mark.usefixtures("untried")
def test_a_trial_that_fails_leaves_single_precision(
    monkeypatch: pytest.MonkeyPatch, trial: str
) -> None:
    monkeypatch.setattr(precision, "TRIAL", trial)
    monkeypatch.setattr(precision, "PATIENCE_SECONDS", 2)
    assert gain_of_bfloat16() == 0
    assert chosen("auto") is torch.float32


def test_the_context_is_entered_for_bfloat16_only() -> None:
    with computing("float32"):
        assert not torch.is_autocast_enabled("cpu")
    with computing("bfloat16"):
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16
