"""Detectors on the command line: quantize, eval, show, export, and what is refused."""

from __future__ import annotations

import base64
import json
import shutil
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome
from PIL import Image
from safetensors.torch import save_file
from tiny import tiny_detector, tiny_samples

from lampq.detection.coco import write_coco
from lampq.detection.mmdet import mmdet_state
from lampq.detection.weights import load_detector
from lampq.errors import ConfigError, FormatError

pytest.importorskip("faster_coco_eval")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of the tiny detector, and four pictures of two sizes as COCO data."""
    folder = tmp_path_factory.mktemp("data")
    model = tiny_detector()
    options = json.dumps(model.options.to_json())
    save_file(model.state_dict(), folder / "weights.safetensors", metadata={"options": options})
    write_coco(tiny_samples(), folder / "coco")
    return folder


def flags(data: Path, *, evaluate: bool = True) -> list[Any]:
    coco = data / "coco"
    pictures, file = coco / "images", coco / "annotations.json"
    given = ["--calib", pictures, "--calib-annotations", file]
    return given + (["--eval", pictures, "--eval-annotations", file] if evaluate else [])


SMALL = ("--method", "minmax", "--choices", "3,4,5", "--exchanges", "1", "--metric", "recon")


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "out"
    weights = ("--weights", data / "weights.safetensors")
    command = ("quantize", "scene_swin", "--task", "detection", *weights, *flags(data), *SMALL)
    found = Outcome(*command, "--out", out, "--quiet")
    assert (found.code, found.err) == (0, "")
    return out


def test_the_report_has_average_precisions_by_size_and_class(run: Path) -> None:
    report = json.loads((run / "report.json").read_text())
    assert report["model"]["kind"] == "detector"
    for name in ("fp32", "uniform", "mixed"):
        score = report["scores"][name]
        assert score["images"] == 4
        for kind in ("box", "mask"):
            assert set(score[kind]) >= {"ap", "ap50", "ap75", "small", "medium", "large"}
            assert len(score[kind]["per_class"]) == 10
    assert report["calibration"]["mixed"]["ap"] is None, "nothing asked for it"
    assert report["calibration"]["mixed"]["likelihood"] < 0
    text = (run / "report.md").read_text()
    assert "box AP [%]" in text
    assert "## AP [%] by size and class" in text
    assert "| t-shirt |" in text


def test_the_page_shows_box_ap(run: Path) -> None:
    text = (run / "report.html").read_text()
    assert '"title":"Box AP"' in text
    assert '"fp32 mask"' in text


def test_detections_of_both_models_are_shown_side_by_side(run: Path) -> None:
    content = (run / "detections.jpg").read_bytes()
    with Image.open(BytesIO(content)) as picture:
        # two columns of 96 pixels and four rows of 96, with gaps and a line of names
        assert (picture.format, picture.size) == ("JPEG", (8 + 2 * 104, 24 + 4 * 104))
    assert json.loads((run / "report.json").read_text())["files"]["detections.jpg"] == len(content)
    assert "(detections.jpg)" in (run / "report.md").read_text()
    page = (run / "report.html").read_text()
    assert f"data:image/jpeg;base64,{base64.b64encode(content).decode()}" in page
    assert 'href="#pictures"' in page


def test_a_page_is_made_again_without_a_picture_that_is_gone(run: Path, tmp_path: Path) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    (copied / "detections.jpg").unlink()
    assert Outcome("report", copied).code == 0
    page = (copied / "report.html").read_text()
    assert "image/jpeg" not in page
    assert "#pictures" not in page


def test_the_page_names_no_command_that_refuses_detectors(run: Path) -> None:
    text = (run / "report.html").read_text()
    assert "Detectors are not timed" in text
    assert "lampq bench" not in text


def test_eval_gives_the_scores_of_the_report(run: Path, data: Path) -> None:
    pictures = ("--data", data / "coco/images", "--annotations", data / "coco/annotations.json")
    found = Outcome("eval", run / "model.safetensors", *pictures, "--json")
    assert found.code == 0
    answer = json.loads(found.out)
    report = json.loads((run / "report.json").read_text())
    assert {key: answer[key] for key in ("box", "mask", "images")} == report["scores"]["mixed"]
    shown = Outcome("eval", run / "model.safetensors", *pictures, "--images", "2", "--quiet")
    assert "| box AP [%] | mask AP [%] | images |" in shown.out


def test_show_lists_neck_and_heads(run: Path) -> None:
    found = Outcome("show", run / "model.safetensors")
    assert found.code == 0
    assert "rpn.head.cls_logits (rpn): 4/4 bits" in found.out
    assert "format 4" in found.out


def test_a_file_can_stand_for_the_model(data: Path, tmp_path: Path) -> None:
    shutil.copy(data / "weights.safetensors", tmp_path / "weights.safetensors")
    shutil.copytree(data / "coco", tmp_path / "coco")
    (tmp_path / "job.toml").write_text(
        """
        task = "detection"
        model = "scene_swin"
        weights = "weights.safetensors"
        calib = "coco/images"
        calib_annotations = "coco/annotations.json"
        out = "run"
        method = "minmax"
        choices = [4]
        exchanges = 0
        metric = "recon"
        head_bits = "float"

        [detector]
        detections = 7
        """
    )
    found = Outcome("quantize", tmp_path / "job.toml", "--images", "2", "--quiet")
    assert (found.code, found.err) == (0, "")
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert report["model"]["options"]["detections"] == 7
    assert report["data"]["calibration_images"] == 2
    assert report["scores"] == {}
    assert not any("rpn" in name for name in report["plan"]["layers"])


def test_the_pyramid_is_exported_and_verified(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    out = tmp_path / "pyramid.onnx"
    found = Outcome("export", run, "--out", out, "--images", "2", "--size", "44x52", "--json")
    assert found.code == 0
    answer = json.loads(found.out)
    assert answer["size"] == [44, 52]
    assert all(one["difference"] <= 1e-3 for one in answer["verified"])
    assert out.stat().st_size == answer["bytes"]


def missing(data: Path) -> dict[str, tuple[list[Any], str]]:
    """Flags of a wrong command, and what is said of it."""
    ready = ["--weights", data / "weights.safetensors"]
    coco = data / "coco"
    return {
        "no annotations": ([*ready, "--calib", coco / "images"], "give --calib DIR and"),
        "no weights": (flags(data), "a detector needs trained weights: give --weights FILE"),
        "eval alone": (
            [*ready, *flags(data, evaluate=False), "--eval", coco / "images"],
            "give --eval DIR and --eval-annotations FILE together",
        ),
        "no folder": (
            [*ready, "--calib", "nowhere", "--calib-annotations", coco / "annotations.json"],
            "no folder 'nowhere'",
        ),
        "no file": (
            [*ready, "--calib", coco / "images", "--calib-annotations", "none.json"],
            "no annotations file 'none.json'",
        ),
        "zero shot": ([*ready, "--zero-shot"], "are for classifiers"),
        "pixels": ([*ready, *flags(data), "--mean", "0.5"], "are for classifiers"),
        "reconstruct": ([*ready, *flags(data), "--reconstruct", "align"], "cannot be reconstr"),
        "accept": ([*ready, *flags(data), "--accept", "kl"], "accept must be ap or loss"),
    }


@pytest.mark.parametrize(
    "what",
    [
        *("no annotations", "no weights", "eval alone", "no folder", "no file", "zero shot"),
        *("pixels", "reconstruct", "accept"),
    ],
)
def test_what_is_wrong_is_one_sentence(what: str, data: Path, tmp_path: Path) -> None:
    words, said = missing(data)[what]
    command = ("quantize", "scene_swin", "--task", "detection", *words)
    found = Outcome(*command, "--out", tmp_path / "run")
    assert (found.code, found.err.count("\n")) == (2, 1)
    assert said in found.err


def test_flags_of_detectors_are_refused_for_classifiers(data: Path, tmp_path: Path) -> None:
    file = data / "coco/annotations.json"
    found = Outcome("quantize", "--calib-annotations", file, "--out", tmp_path / "run")
    assert (found.code, "--task detection" in found.err) == (2, True)


def test_categories_must_be_the_classes_of_the_detector(data: Path, tmp_path: Path) -> None:
    content = json.loads((data / "coco/annotations.json").read_text())
    content["categories"].append({"id": 99, "name": "hat"})
    file = tmp_path / "more.json"
    file.write_text(json.dumps(content))
    found = Outcome(
        *("quantize", "scene_swin", "--task", "detection", "--out", tmp_path / "run"),
        *("--weights", data / "weights.safetensors"),
        *("--calib", data / "coco/images", "--calib-annotations", file, *SMALL, "--quiet"),
    )
    assert found.code == 2
    assert "lists 11 categories, the detector has 10 classes" in found.err


def test_weights_of_both_kinds_of_names_are_read(data: Path, tmp_path: Path) -> None:
    model = tiny_detector()
    own = load_detector("scene_swin", data / "weights.safetensors")
    assert own.options == model.options
    path = tmp_path / "published.safetensors"
    save_file({k: v.contiguous() for k, v in mmdet_state(model).items()}, path)
    with pytest.raises(ConfigError, match="holds a swin_tiny_patch4_window7_224, not a"):
        load_detector("swin_small_patch4_window7_224", path)
    with pytest.raises(ConfigError, match="not a swin_tiny"):
        load_detector("swin_tiny_patch4_window7_224", data / "weights.safetensors")
    save_file({"head.weight": model.rpn.head.cls_logits.weight}, tmp_path / "other.safetensors")
    with pytest.raises(FormatError, match="holds no detector"):
        load_detector("scene_swin", tmp_path / "other.safetensors")


def test_compare_refuses_detectors(tmp_path: Path) -> None:
    (tmp_path / "common.toml").write_text('task = "detection"')
    found = Outcome("compare", "--config", tmp_path / "common.toml", "--out", tmp_path / "run")
    assert (found.code, "a comparison is one of classifiers" in found.err) == (2, True)


def test_bench_refuses_detectors(run: Path) -> None:
    found = Outcome("bench", run)
    assert (found.code, "lampq bench measures classifiers" in found.err) == (2, True)
