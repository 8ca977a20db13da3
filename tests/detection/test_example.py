"""The detector of the examples finds what is in scenes of items that it has never seen."""

from __future__ import annotations

from pathlib import Path

import pytest

import lampq
from lampq.detection.ap import average_precision, detect
from lampq.detection.scenes import NAMES, bundled_scenes
from lampq.detection.weights import load_detector
from lampq.export_detector import export_pyramid

pytest.importorskip("faster_coco_eval")

WEIGHTS = Path(__file__).parents[2] / "examples" / "detector" / "scene_swin.safetensors"


def test_the_example_detector_is_trained() -> None:
    model = load_detector("scene_swin", WEIGHTS)
    assert model.options.classes == len(NAMES)
    scenes = bundled_scenes("eval", 40)
    scores = average_precision(scenes, detect(model, scenes))
    assert scores.box.ap is not None
    assert scores.mask.ap is not None
    # on 500 scenes it has the scores of docs/detection.md; 40 are a rough check
    assert scores.box.ap > 0.58
    assert scores.mask.ap > 0.53


def test_the_example_detector_is_small() -> None:
    assert WEIGHTS.stat().st_size < 8e6


def test_the_example_detector_is_exported(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    scenes = bundled_scenes("calib", 4)
    result = lampq.quantize(
        load_detector("scene_swin", WEIGHTS),
        scenes,
        bits=4,
        choices=(4,),
        method="minmax",
        metric="recon",
        exchanges=0,
    )
    result.save(tmp_path / "model.safetensors")
    found = export_pyramid(
        tmp_path / "model.safetensors",
        tmp_path / "model.onnx",
        scenes,
        runtimes=("onnxruntime",),
    )
    assert [one.runtime for one in found.verified] == ["onnxruntime"]
    assert (tmp_path / "model.onnx").is_file()
