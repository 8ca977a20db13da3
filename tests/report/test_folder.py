from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Outcome, few_bundled

from lampq.report.content import page_content
from lampq.report.folder import read_run

QUICK = [
    *("--method", "minmax", "--choices", "2,3", "--bits", "2.5", "--quiet", "--exchanges", "0"),
    *("--images", "16", "--fit-images", "8", "--metric-images", "8", "--score-images", "8"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    out = tmp_path_factory.mktemp("folder") / "run"
    with few_bundled(20):
        assert Outcome("quantize", "fashion_swin", "--out", out, *QUICK).code == 0
    return out


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of a finished run, to be spoilt."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def _changed(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_run_without_histograms_has_a_page_too(folder: Path) -> None:
    (folder / "histograms.json").unlink()
    assert Outcome("report", folder).code == 0
    assert page_content(read_run(folder))["histograms"] is None


def test_a_report_of_before_exchanges_had_their_widths_has_a_page(folder: Path) -> None:
    step = {"widened": ["a"], "narrowed": ["b"], "score": -1.0, "accepted": False}
    _changed(folder / "report.json", exchanges=[step])
    (found,) = page_content(read_run(folder))["exchanges"]["steps"]
    assert (found["predicted"], found["gained"]) == (None, None)


def test_quiet_says_nothing(folder: Path) -> None:
    found = Outcome("report", folder, "--quiet")
    assert (found.code, found.out, found.err) == (0, "", "")


def test_other_runs_of_the_model_add_their_scores(folder: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    assert Outcome("report", folder, "--with", other).code == 0
    (point,) = page_content(read_run(folder, [other]))["others"]
    report = json.loads((other / "report.json").read_text())
    assert point["name"] == "other"
    assert point["bytes"] == report["files"]["model.safetensors"]
    assert point["top1"] == report["scores"]["mixed"]["top1"]


def test_measured_times_are_shown(folder: Path) -> None:
    (folder / "speed.json").write_text(json.dumps({"fp32": 4.0, "mixed": 2.5, "note": "ours"}))
    content = page_content(read_run(folder))
    assert content["speed"] == {"fp32": 4.0, "mixed": 2.5, "note": "ours"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("report.json", None, "holds no finished run: it has no report.json"),
        ("report.json", "{", "is no JSON"),
        ("report.json", "[]", "holds a list, not an object"),
        ("report.json", '{"report_version": 99}', "has report version 99, this lampq reads up to"),
        ("report.json", '{"report_version": 1}', "do not belong together or are damaged"),
        ("sensitivity.json", None, "cannot be read: No such file"),
        ("sensitivity.json", '{"cost": {}}', "do not belong together or are damaged"),
        ("histograms.json", '{"histograms_version": 2}', "has version 2, this lampq reads 1"),
        ("model.safetensors", None, "no checkpoint"),
        ("speed.json", '{"fp32": 1.0}', "has None for 'mixed': expected milliseconds"),
        ("speed.json", '{"mixed": -1}', "has -1 for 'mixed'"),
        ("speed.json", '{"mixed": 1, "note": 3}', "has a note that is no text"),
    ],
)
def test_a_folder_that_cannot_be_read_is_one_sentence_and_leaves_the_page(
    folder: Path, name: str, content: str | None, message: str
) -> None:
    before = (folder / "report.html").read_bytes()
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    found = Outcome("report", folder)
    assert found.code == 2
    assert message in found.err
    assert found.err.startswith("lampq: ")
    assert found.err.count("\n") == 1
    assert (folder / "report.html").read_bytes() == before


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    found = Outcome("report", tmp_path / "none")
    assert (found.code, found.err) == (2, f"lampq: no run folder '{tmp_path / 'none'}'\n")


def test_runs_of_different_models_do_not_compare(folder: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    _changed(other / "report.json", model={"kind": "timm", "name": "another", "options": {}})
    found = Outcome("report", folder, "--with", other)
    assert found.code == 2
    assert "is a run of another" in found.err
