"""The table of detectors, on a tiny one with random weights."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome
from detection.tiny import tiny_detector, tiny_samples
from reproduce.test_table import balanced, rows_of_markdown
from reproduce.tiny import read
from safetensors.torch import save_file

import lampq.reproduce.detection
import lampq.reproduce.lab
from lampq.compare import make_trials
from lampq.detection.coco import write_coco
from lampq.detection.source import DetectorSource
from lampq.detection.task import DetectionTask
from lampq.errors import ConfigError
from lampq.progress import Progress
from lampq.reproduce.detection import METHODS, OWN, PART, tables
from lampq.reproduce.full import checkpoints
from lampq.reproduce.published import DETECTION, DETECTORS, label_of

pytest.importorskip("faster_coco_eval")

OPTIONS = """
images = 3
fit_images = 2
metric_images = 2
score_images = 2
probe_images = 2
trace_images = 1
exchanges = 1
configurations = 4

"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of the tiny detector, four pictures as COCO data, and quick options."""
    folder = tmp_path_factory.mktemp("data")
    model = tiny_detector()
    options = json.dumps(model.options.to_json())
    save_file(model.state_dict(), folder / "weights.safetensors", metadata={"options": options})
    write_coco(tiny_samples(), folder / "coco")
    (folder / "quick.toml").write_text(OPTIONS)
    return folder


def flags(data: Path, *without: str) -> list[Any]:
    """All that the table needs, but for some flags."""
    pictures, file = data / "coco/images", data / "coco/annotations.json"
    given = {
        "--weights": data / "weights.safetensors",
        **{"--calib": pictures, "--calib-annotations": file},
        **{"--eval": pictures, "--eval-annotations": file},
        "--config": data / "quick.toml",
    }
    return [word for flag, value in given.items() if flag not in without for word in (flag, value)]


@pytest.fixture
def quick_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every method has the fits of min-max, which take a fraction of the time."""
    _use_minmax(monkeypatch)


def _use_minmax(patch: pytest.MonkeyPatch) -> None:
    quick = tuple(replace(method, options={"method": "minmax"}) for method in METHODS)
    patch.setattr(lampq.reproduce.detection, "METHODS", quick)


@pytest.fixture(scope="module")
def out(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole table."""
    folder = tmp_path_factory.mktemp("reproduce") / "detection"
    with pytest.MonkeyPatch.context() as patch:
        _use_minmax(patch)
        found = Outcome("reproduce", "detection", "scene_swin", *flags(data), "--out", folder)
    assert found.code == 0, found.err
    (folder / "said").write_text(found.out + found.err)
    return folder


def test_the_table_has_the_float_detector_and_three_methods_at_two_widths(out: Path) -> None:
    rows = read(out, "detection")["result"]["rows"]
    assert [(row["key"], row["at"]) for row in rows] == [
        ("float", "32/32"),
        *((key, at) for at in ("4/4", "3/3") for key in ("adalog", "vtptq", "lampq")),
    ]
    for row in rows:
        assert row["images"] == 4
        assert 0 <= row["box_ap"] <= 100
        assert 0 <= row["mask_ap"] <= 100
    for row in rows[1:]:
        # heads and neck keep the target; what is searched keeps the budget
        assert row["mean_weight_bits"] <= int(row["at"][0])
        assert row["file_bytes"] < rows[0]["file_bytes"]
        assert isinstance(row["calibration"], float)


def test_the_float_row_is_the_score_of_the_detector(out: Path) -> None:
    row = read(out, "detection")["result"]["rows"][0]
    score = DetectionTask().score(tiny_detector(), tiny_samples(), Progress(), "")
    assert row["box_ap"] == pytest.approx(100 * score["box"]["ap"])
    assert row["mask_ap"] == pytest.approx(100 * score["mask"]["ap"])


def test_the_files_have_both_precisions_and_how_they_were_made(out: Path) -> None:
    text = (out / "detection.md").read_text()
    listed = list(csv.reader(io.StringIO((out / "detection.csv").read_text())))
    assert rows_of_markdown(text) == listed
    assert listed[0][:4] == ["method", "W/A", "AP box", "AP mask"]
    assert balanced((out / "detection.tex").read_text())
    assert (out / "detection.png").read_bytes().startswith(b"\x89PNG")
    assert "Table 4 of the paper" in text
    assert "lampq reproduce detection scene_swin --weights weights.safetensors" in text
    assert "--eval-annotations annotations.json" in text
    assert "3 calibration images and 4 evaluation images" in text
    assert "LampQ 3/3: box AP" in (out / "said").read_text()


def test_a_second_run_computes_nothing(
    out: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lampq.reproduce.lab, "quantized", None)
    before = (out / "detection.csv").read_bytes()
    (out / "detection.csv").unlink()
    more = ("--out", out, "--no-pictures")
    found = Outcome("reproduce", "detection", "scene_swin", *flags(data), *more)
    assert found.code == 0, found.err
    assert "1/1 detection: was finished before" in found.err
    assert (out / "detection.csv").read_bytes() == before


def test_another_file_of_annotations_is_refused_in_the_same_folder(
    out: Path, data: Path, tmp_path: Path
) -> None:
    file = tmp_path / "other.json"
    file.write_bytes((data / "coco/annotations.json").read_bytes())
    words = (*flags(data, "--eval-annotations"), "--eval-annotations", file)
    found = Outcome("reproduce", "detection", "scene_swin", *words, "--out", out)
    assert (found.code, found.err.count("\n")) == (2, 1)


def test_allocations_are_made_on_adalog() -> None:
    methods = {method.key: method.options for method in METHODS if method.key in OWN}
    assert methods == {key: {"method": "adalog"} for key in ("adalog", "vtptq", "lampq")}


@pytest.mark.slow
def test_every_method_fits_a_detector(data: Path, tmp_path: Path) -> None:
    names = [method.key for method in METHODS]
    rows = ("--rows", ",".join(names), "--bits", 4, "--no-pictures", "--out", tmp_path)
    found = Outcome("reproduce", "detection", "scene_swin", *flags(data), *rows, "--json")
    assert found.code == 0, found.err
    (one,) = json.loads(found.out)["results"]
    assert [row["key"] for row in one["result"]["rows"]] == ["float", *names]
    assert not any("error" in row for row in one["result"]["rows"])


def test_what_a_detector_needs_is_listed_in_one_sentence(tmp_path: Path) -> None:
    found = Outcome("reproduce", "detection", "--out", tmp_path / "run")
    assert (found.code, found.err.count("\n")) == (2, 1)
    assert found.err.endswith(
        "give MODEL, --weights FILE, --calib DIR, --calib-annotations FILE, --eval DIR, "
        "--eval-annotations FILE too\n"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("without", "more", "sentence"),
    [
        ("--weights", [], "give --weights FILE too"),
        ("--eval-annotations", [], "give --eval-annotations FILE too"),
        ("--calib", ["--calib", "nowhere"], "no folder 'nowhere'"),
        ("--eval-annotations", ["--eval-annotations", "none.json"], "no annotations file 'none"),
        ("", ["--mean", "0.5"], "are for classifiers: leave them out"),
        ("", ["--rows", "qdrop"], "unknown row 'qdrop' of detection; known: repq, optq"),
        ("", ["--bits", "12"], "bits must be in 1..10, got 12"),
    ],
)
def test_wrong_input_gives_one_sentence(
    without: str, more: list[str], sentence: str, data: Path, tmp_path: Path
) -> None:
    words = (*flags(data, without), *more, "--out", tmp_path / "run")
    found = Outcome("reproduce", "detection", "scene_swin", *words)
    assert (found.code, found.err.count("\n")) == (2, 1)
    assert sentence in found.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["all", "ablation", "--full"])
def test_annotations_are_refused_for_classifiers(name: str, data: Path, tmp_path: Path) -> None:
    words = ("--calib-annotations", data / "coco/annotations.json", "--out", tmp_path / "run")
    found = Outcome("reproduce", name, *words)
    assert (found.code, found.err.count("\n")) == (2, 1)
    assert "are for detectors: name the table, lampq reproduce detection" in found.err


def test_the_task_cannot_be_changed_by_options(tmp_path: Path) -> None:
    (tmp_path / "task.toml").write_text('task = "detection"')
    found = Outcome("reproduce", "ablation", "--config", tmp_path / "task.toml")
    assert found.code == 2
    assert "are of classification: leave task = 'detection' out" in found.err


def test_pictures_without_objects_are_refused_before_any_work(data: Path, tmp_path: Path) -> None:
    content = json.loads((data / "coco/annotations.json").read_text())
    file = tmp_path / "empty.json"
    file.write_text(json.dumps({**content, "annotations": []}))
    words = (*flags(data, "--eval-annotations"), "--eval-annotations", file)
    found = Outcome("reproduce", "detection", "scene_swin", *words, "--out", tmp_path / "run")
    assert found.code == 2
    assert "has no object to find" in found.err


def test_comparisons_refuse_detectors_unless_they_are_asked_for() -> None:
    with pytest.raises(ConfigError, match="a comparison is one of classifiers"):
        make_trials({"task": "detection"}, bits=(4,))
    (trial,) = make_trials({"task": "detection"}, plans=("lampq",), tasks=("detection",))
    assert trial.config.accept == "loss"


def test_detectors_of_the_paper_are_known_by_backbone_kind_and_classes() -> None:
    options = replace(tiny_detector().options, name="swin_tiny_patch4_window7_224", classes=80)
    assert label_of(DetectorSource.of(options)) == "Mask R-CNN Swin-T"
    cascade = replace(options, cascade=True)
    assert label_of(DetectorSource.of(cascade)) == "Cascade Mask R-CNN Swin-T"
    other = replace(options, classes=10)
    assert label_of(DetectorSource.of(other)) == "swin_tiny_patch4_window7_224"


def test_published_rows_have_the_averages_that_the_paper_prints() -> None:
    averages = {"float": 46.3, "repq": 42.2, "optq": 42.1, "erq": 42.6}
    averages |= {"adalog": 43.4, "vtptq": 43.6, "lampq": 44.1}
    for (key, _), models in DETECTION.items():
        values = [value for pair in models.values() for value in pair]
        assert len(values) == 8
        assert sum(values) / 8 == pytest.approx(averages[key], abs=0.0501)


def test_several_detectors_make_one_table() -> None:
    row = {"key": "lampq", "method": "LampQ", "at": "4/4", "mixed": True}
    found = [
        {"label": label, "result": {"rows": [{**row, "box_ap": 10.0 * i, "mask_ap": 20.0 * i}]}}
        for i, label in enumerate(DETECTORS, 1)
    ]
    (table,) = tables(found)
    (cells,) = csv.DictReader(io.StringIO(table.csv()))
    assert cells["Mask R-CNN Swin-S, AP mask"] == "40.0"
    assert cells["Cascade Mask R-CNN Swin-S, published, AP box"] == "51.1"
    assert cells["mean AP box"] == "25.0"


def test_weights_of_the_paper_are_looked_for_by_their_public_names(tmp_path: Path) -> None:
    (tmp_path / "cascade_mask_rcnn_swin_small_patch4_window7.pth").touch()
    here = {one.label: one.path is not None for one in checkpoints((PART,), tmp_path)}
    assert here == {label: label == "Cascade Mask R-CNN Swin-S" for label in DETECTORS}


@pytest.mark.usefixtures("quick_methods")
def test_full_runs_the_detectors_whose_weights_are_here(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = Outcome("reproduce", "detection", "--full", "--checkpoints", tmp_path)
    assert listed.code == 0
    assert "nothing of it can be run here" in listed.out
    assert "--calib DIR with --calib-annotations FILE" in " ".join(listed.out.split())
    name = "mask_rcnn_swin_tiny_patch4_window7.safetensors"
    (tmp_path / name).write_bytes((data / "weights.safetensors").read_bytes())
    tiny = replace(DETECTORS["Mask R-CNN Swin-T"], name="scene_swin")
    monkeypatch.setitem(DETECTORS, "Mask R-CNN Swin-T", tiny)
    words = ("--full", "--checkpoints", tmp_path, "--rows", "adalog", "--bits", 4, "--no-pictures")
    given = flags(data, "--weights")
    found = Outcome("reproduce", "detection", *words, *given, "--out", tmp_path / "out")
    assert found.code == 0, found.err
    assert (tmp_path / "out/Mask-R-CNN-Swin-T/detection.json").exists()
    assert (tmp_path / "out/detection.csv").exists()
