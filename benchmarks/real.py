"""The real ViT-Tiny and its images, where the environment variable LAMPQ_REAL says they are."""

from __future__ import annotations

import os
from pathlib import Path

from lampq.data import Preprocessing, Samples, read_folder
from lampq.models import LoadedModel, load_model

NAME = "vit_tiny_patch16_224"
# the pictures are already resized and cropped: they are taken whole
HOW = Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3, size=224)


def root() -> Path:
    """The folder with weights and images."""
    folder = Path(os.environ.get("LAMPQ_REAL", "../shared"))
    if not (folder / "weights" / f"{NAME}.safetensors").is_file():
        raise SystemExit(f"no {NAME}.safetensors below {folder}: set LAMPQ_REAL")
    return folder


def model() -> LoadedModel:
    """The float model."""
    return load_model(NAME, root() / "weights" / f"{NAME}.safetensors")


def calibration() -> Samples:
    """1,000 training images, one per class."""
    return read_folder(root() / "data" / "imagenet" / "calib1000", HOW)


def evaluation() -> Samples:
    """2,000 validation images, two per class."""
    return read_folder(root() / "data" / "imagenet" / "val2000", HOW)
