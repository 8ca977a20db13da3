from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome

import lampq.inputs
import lampq.sweep.trial
from lampq.errors import BudgetError
from lampq.metrics import METRICS, Evidence, Sensitivity
from lampq.runfolder import run_job
from lampq.sweep import read_results
from lampq.types import LayerBits

Write = Callable[[str], Path]


class Failing:
    """A metric that cannot be measured."""

    def __call__(self, evidence: Evidence, choices: tuple[LayerBits, ...]) -> Sensitivity:
        raise BudgetError("this one fails")


@pytest.fixture(scope="module")
def finished(quick_sweep: Write, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """The folder of a sweep of which one trial failed, and what was said."""
    out = tmp_path_factory.mktemp("cli") / "out"
    path = quick_sweep(
        '[[trials]]\ngamma = 4.0\n[[trials]]\nmetric = "hawq"\n[[trials]]\ngamma = 2.0\n'
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METRICS._factories, "hawq", Failing)
        return out, Outcome("sweep", path, "--out", out)


def test_a_failed_trial_is_a_row_and_the_others_go_on(finished: tuple[Path, Outcome]) -> None:
    out, said = finished
    assert said.code == 0
    rows = read_results(out)
    assert [row["status"] for row in rows].count("finished") == 2
    (failed,) = (row for row in rows if row["status"] == "failed")
    assert (failed["metric"], failed["failure"]) == ("hawq", "this one fails")
    assert "failed: this one fails" in said.out
    assert "3/3 " in said.err
    assert re.search(r"about \d+:\d\d left", said.err)
    assert {path.name for path in out.iterdir()} >= {"sweep.sqlite", "table.md", "table.csv"}


def test_best_is_the_folder_with_the_best_calibration_score(finished: tuple[Path, Outcome]) -> None:
    out, _ = finished
    rows = [row for row in read_results(out) if row["status"] == "finished"]
    wanted = max(rows, key=lambda row: row["calibration_agreement"])
    found = Outcome("sweep", out, "--best")
    assert (found.code, found.out.strip()) == (0, str(out / wanted["folder"]))
    assert (out / wanted["folder"] / "model.safetensors").is_file()
    (row,) = json.loads(Outcome("sweep", out, "--best", "--by", "loss", "--json").out)
    assert row["calibration_likelihood"] == max(r["calibration_likelihood"] for r in rows)


def test_a_folder_is_shown_without_running_anything(finished: tuple[Path, Outcome]) -> None:
    out, said = finished
    again = Outcome("sweep", out)
    assert (again.code, again.err) == (0, "")
    assert again.out == said.out
    assert json.loads(Outcome("sweep", out, "--json").out) == read_results(out)


def test_a_sweep_is_not_overwritten(finished: tuple[Path, Outcome], quick_sweep: Write) -> None:
    found = Outcome("sweep", quick_sweep(""), "--out", finished[0])
    assert (found.code, "already holds a sweep" in found.err) == (2, True)
    found = Outcome("quantize", "--out", finished[0])
    assert (found.code, "unfinished run" in found.err) == (2, True)


def test_an_interrupted_sweep_says_how_to_go_on(
    quick_sweep: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[float] = []

    def interrupted(job: Any, *rest: Any) -> Any:
        jobs.append(job.settings.gamma)
        if len(jobs) == 2:
            raise KeyboardInterrupt
        return run_job(job, *rest)

    monkeypatch.setattr(lampq.sweep.trial, "run_job", interrupted)
    path, out = quick_sweep("[grid]\ngamma = [4.0, 2.0]\n"), tmp_path / "out"
    found = Outcome("sweep", path, "--out", out, "--quiet")
    assert (found.code, found.err.count("\n")) == (130, 1)
    assert found.err.startswith("lampq: interrupted (finished trials are kept); continue with")
    found = Outcome("sweep", path, "--out", out, "--quiet", "--resume")
    assert (found.code, found.out, found.err) == (0, "", "")
    assert jobs == [4.0, 2.0, 2.0]
    assert len(read_results(out)) == 2
    found = Outcome("sweep", path, "--out", out, "--quiet", "--resume")
    assert (found.code, jobs) == (0, [4.0, 2.0, 2.0])


def test_a_dry_run_lists_the_trials_and_writes_nothing(quick_sweep: Write, tmp_path: Path) -> None:
    path = quick_sweep("[grid]\ngamma = [4.0, 2.0]\nseed = [0, 1]\n")
    found = Outcome("sweep", path, "--out", tmp_path / "out", "--dry-run")
    assert found.code == 0
    assert len(re.findall(r"^gamma=[42],seed=[01]-\w{6}  fits [12]$", found.out, re.M)) == 4
    assert "4 trials, 2 sets of fits" in found.out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("gama = 3\n", (), "unknown option 'gama'; known: gamma"),
        ('[grid]\nmethod = ["minmax", "adalgo"]\n', (), "unknown method 'adalgo'"),
        ("[grid]\ngamma = [4.0, 1]\n", (), "gamma must be above 1, got 1"),
        ("", ("--workers", "0"), "workers must be at least 1, got 0"),
        ("", ("--by", "top1"), "unknown score 'top1'; known: kl, loss, accuracy"),
        ("", ("--resume",), "holds no sweep to resume"),
    ],
)
def test_what_is_wrong_is_one_sentence_before_any_work(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr(lampq.inputs, "bundled_samples", lambda _: pytest.fail("pictures are read"))
    (tmp_path / "s.toml").write_text(text)
    found = Outcome("sweep", tmp_path / "s.toml", "--out", tmp_path / "run", *arguments)
    assert (found.code, found.out) == (2, "")
    assert re.fullmatch(r"lampq: [^\n]+[^\n.]\n", found.err)
    assert message in found.err
    assert not (tmp_path / "run").exists()


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    found = Outcome("sweep", tmp_path / "none.toml", "--out", tmp_path / "run")
    assert (found.code, "no configuration file" in found.err) == (2, True)
    found = Outcome("sweep", tmp_path, "--best")
    assert (found.code, "holds no sweep" in found.err) == (2, True)
