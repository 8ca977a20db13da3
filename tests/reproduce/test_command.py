from __future__ import annotations

import csv
import io
import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome
from reproduce.tiny import make_files, reproduce, tiny_model

import lampq.cli.reproduce
import lampq.reproduce.lab
from lampq.artifact.checkpoint import write_atomically
from lampq.compare import quantized
from lampq.models import bundled_samples
from lampq.reproduce import PARTS
from lampq.reproduce.published import MODELS, RUNTIME
from lampq.zero_shot.folder import png


@pytest.fixture(scope="module", autouse=True)
def tiny() -> Iterator[None]:
    """The tiny model can be asked for."""
    with tiny_model():
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights and options."""
    return make_files(tmp_path_factory.mktemp("files"))


def test_an_interrupted_part_goes_on_with_the_trials_that_are_left(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []

    def counted(*arguments: Any, **named: Any) -> Any:
        names.append(arguments[2].allocator)
        if len(names) == 3:
            raise KeyboardInterrupt
        return quantized(*arguments, **named)

    monkeypatch.setattr(lampq.reproduce.lab, "quantized", counted)
    stopped = reproduce(files, "ablation", tmp_path, "--no-pictures")
    assert stopped.code == 130
    assert "the same command goes on" in stopped.err
    assert not (tmp_path / "ablation.json").exists()
    assert reproduce(files, "ablation", tmp_path, "--no-pictures").code == 0
    assert len(names) == 3 + 3  # the interrupted one again, and the two after it
    assert not (tmp_path / "ablation.png").exists()


def test_parts_share_trials(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def counted(*arguments: Any, **named: Any) -> Any:
        seen.append(arguments[2].allocator)
        return quantized(*arguments, **named)

    monkeypatch.setattr(lampq.reproduce.lab, "quantized", counted)
    quick = ("--no-pictures", "--quiet")
    assert reproduce(files, "allocation", tmp_path, *quick).code == 0
    assert len(seen) == 2
    # the first gave the nuclear norms already; the Fisher metric without exchanges is new
    assert reproduce(files, "metric", tmp_path, *quick).code == 0
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["clasification"], "unknown table or figure 'clasification'; known: errors, "),
        (["all", "--bits", "3"], "--bits and --rows are for one table or figure"),
        (["ablation", "--rows", "base,what"], "unknown row 'what' of ablation; known: base, vtptq"),
        (["metric", "--rows", "lampq"], "unknown row 'lampq' of metric; it has none to choose"),
        (["ablation", "--bits", "12"], "bits must be in 1..10, got 12"),
        (["ablation", "--bits", "x"], "bits must be numbers with commas between"),
        (["ablation", "--eval-images", "0"], "eval-images must be at least 1, got 0"),
        (["ablation", "vit_tiny_patch16_224"], "ablation needs calibration pictures"),
        (["ablation", "--calib", "nowhere"], "no folder 'nowhere'"),
        (["errors", "--checkpoints", "."], "--checkpoints is for --full"),
        (["ablation", "tiny", "--full"], "--full has its own models"),
        (["ablation", "--full", "--checkpoints", "nowhere"], "no folder of checkpoints 'nowhere'"),
    ],
)
def test_wrong_input_gives_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = Outcome("reproduce", *arguments)
    assert found.code == 2
    assert found.err.startswith(f"lampq: {sentence}")
    assert found.err.count("\n") == 1


def test_missing_matplotlib_is_told_before_any_work(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = reproduce(files, "ablation", tmp_path / "run")
    assert found.code == 2
    assert "pip install 'lampq[reproduce]'" in found.err
    assert not (tmp_path / "run").exists()


def test_without_a_name_the_parts_are_listed() -> None:
    found = Outcome("reproduce")
    assert found.code == 0
    assert [line.split()[0] for line in found.out.splitlines()] == [*PARTS, "all"]


def test_full_lists_what_is_needed_and_runs_what_is_here(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for label in MODELS:
        monkeypatch.setitem(MODELS, label, "tiny" if label == "DeiT-S" else f"absent_{label}.x")
    weights = tmp_path / "weights"
    weights.mkdir()
    listed = Outcome("reproduce", "runtime", "--full", "--checkpoints", weights)
    assert listed.code == 0
    assert "nothing of it can be run here" in listed.out
    assert "absent_ViT-S.x" in listed.out
    shutil.copy(files / "tiny.safetensors", weights / "tiny.safetensors")
    pictures = _pictures(tmp_path / "pictures")
    arguments = ("--full", "--checkpoints", weights, "--calib", pictures, "--eval", pictures)
    quick = ("--config", files / "quick.toml", "--out", tmp_path / "out")
    found = Outcome("reproduce", "runtime", *arguments, *quick)
    assert found.code == 0, found.err
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out/runtime.csv").read_text())))
    assert {row["model"] for row in rows} == {"DeiT-S"}
    # hours and seconds of the paper's table of times
    assert [row["published, seconds"] for row in rows] == ["278.9", "", "484.5", "144720.0"]
    assert float(rows[-1]["published, x base"]) == pytest.approx(518.9, abs=0.05)
    assert (tmp_path / "out/DeiT-S/runtime.json").exists()


def _pictures(folder: Path) -> Path:
    samples = bundled_samples("calib").subset(12, 0)
    lines = ["file,label"]
    for number, image in enumerate(samples.images):
        write_atomically(folder / "images" / f"{number}.png", png(image))
        lines.append(f"{number}.png,{int(samples.require_labels('a test')[number])}")
    write_atomically(folder / "labels.csv", "\n".join(lines).encode())
    return folder


def test_published_speed_ups_are_those_of_the_paper() -> None:
    # "speedups of 250x or more, with maximum gains of 335x over VT-PTQ"
    gains = [whole / ours for _, whole, ours in RUNTIME.values()]
    assert min(gains) > 250
    assert math.floor(max(gains)) == 335


@pytest.mark.parametrize("part", PARTS)
def test_the_command_of_a_part_names_it_once(part: str) -> None:
    one = PARTS[part]
    wanted = f"lampq reproduce {part} M --images 8"
    assert lampq.cli.reproduce._named("lampq reproduce all M --images 8", one) == wanted
    assert lampq.cli.reproduce._named(wanted, one) == wanted
