"""A tiny model, quick options, and calls of lampq reproduce with them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Outcome, _shaken, few_bundled
from safetensors.torch import save_file

from lampq.artifact.checkpoint import write_atomically
from lampq.models import BUNDLED, bundled_architecture

TINY = (
    "VisionTransformer",
    {
        **{"img_size": 28, "patch_size": 7, "in_chans": 1, "num_classes": 10},
        **{"embed_dim": 24, "depth": 2, "num_heads": 3},
    },
)
OPTIONS = """
images = 12
fit_images = 4
metric_images = 4
score_images = 8
probe_images = 8
trace_images = 2
exchanges = 2
iterations = 1
configurations = 5
beta = 2
method = "minmax"
"""
Json = dict[str, Any]


@contextmanager
def tiny_model() -> Iterator[None]:
    """A ViT of two blocks among the bundled models, and few bundled pictures."""
    with few_bundled(20), pytest.MonkeyPatch.context() as patch:
        patch.setitem(BUNDLED, "tiny", TINY)
        yield


def make_files(folder: Path) -> Path:
    """The folder, with weights of the tiny model and quick options in it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _shaken(bundled_architecture("tiny"), seed=1)
    save_file(model.state_dict(), folder / "tiny.safetensors")
    write_atomically(folder / "quick.toml", OPTIONS.encode())
    return folder


def reproduce(files: Path, name: str, out: Path, *more: object) -> Outcome:
    """lampq reproduce on the tiny model."""
    return Outcome(
        *("reproduce", name, "tiny", "--weights", files / "tiny.safetensors"),
        *("--config", files / "quick.toml", "--synthesis-steps", 2, "--out", out, *more),
    )


def read(out: Path, name: str) -> Json:
    """The numbers of a part."""
    found: Json = json.loads((out / f"{name}.json").read_text())
    return found
