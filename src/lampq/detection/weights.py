"""Detectors with trained weights, from files of either kind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from lampq.detection.mmdet import load_mmdet_state, options_in
from lampq.detection.models import PRESETS, Detector
from lampq.detection.options import DetectorOptions
from lampq.errors import ConfigError, FormatError
from lampq.models import check_finite, load_state, read_weights


def load_detector(name: str, weights: Path, **options: Any) -> Detector:
    """The detector of a weights file, in evaluation mode.

    Args:
        name: A Swin of timm, or ``scene_swin``; must be that of the file where the file tells.
        weights: Lampq's own key names, with the options of the detector in the metadata or
            without, or those of mmdetection.
        options: Fields of ``DetectorOptions`` that the file does not tell.

    Raises:
        LampqError: Where the file does not fit; its message names the first key that does not.
    """
    state = read_weights(weights)
    published = any(key.startswith("neck.") for key in state)
    told = options_in(state, str(weights)) if published else _told(weights, state)
    if name != told.get("name", name):
        raise ConfigError(f"{str(weights)!r} holds a {told['name']}, not a {name}")
    values = {**PRESETS.get(name, {}), **told, "name": name, **options}
    model = Detector(DetectorOptions.from_json(values))
    if published:
        load_mmdet_state(model, state, str(weights))
    else:
        load_state(model, state, str(weights))
    check_finite(model)
    ready: Detector = model.eval()
    return ready


def _told(path: Path, state: Mapping[str, Tensor]) -> dict[str, Any]:
    """What a file of lampq's own key names tells of its detector."""
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt") as opened:
                noted = (opened.metadata() or {}).get("options")
            if noted is not None:
                return dict(json.loads(noted))
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            raise FormatError(f"the options in {str(path)!r} cannot be read: {error}") from error
    cascade = any(key.startswith("roi_heads.stages.") for key in state)
    scores = f"roi_heads.{'stages.0.' if cascade else ''}box_predictor.cls_score.weight"
    if scores not in state:
        raise FormatError(f"{str(path)!r} holds no detector: tensor {scores!r} is missing")
    return {"classes": len(state[scores]) - 1, "cascade": cascade}
