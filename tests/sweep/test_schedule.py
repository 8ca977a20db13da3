from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lampq.config import make_config
from lampq.errors import ConfigError
from lampq.report.table import Row
from lampq.sweep import Trial, read_results, run
from lampq.sweep.asked import INPUTS
from lampq.sweep.pool import Death
from lampq.sweep.results import FILE, _asked, failed_row
from lampq.sweep.schedule import _alone, check_folder
from lampq.sweep.trial import folder_of

INPUT = {**dict.fromkeys(INPUTS), "model": "m"}


def trials(**options: list[Any]) -> list[Trial]:
    ((name, values),) = options.items()
    return [Trial(INPUT, make_config({name: value}), {name: value}) for value in values]


class Pretended:
    """A pool whose trials end at once, the last started first, as ``outcome`` says."""

    def __init__(self, out: Path, size: int, outcome: Callable[[Trial], Row | Death]) -> None:
        self.out, self.size, self.outcome = out, size, outcome
        self.running: list[Trial] = []
        self.started: list[Trial] = []
        self.beside: list[set[str]] = []
        self.closed = False

    def start(self, trial: Trial) -> None:
        self.running.append(trial)
        self.started.append(trial)
        self.beside.append({other.share for other in self.running[:-1]})
        assert len(self.running) <= self.size

    def wait(self) -> tuple[Trial, Row | Death]:
        trial = self.running.pop()
        return trial, self.outcome(trial)

    def close(self) -> None:
        self.closed = True


def done(out: Path) -> Callable[[Trial], Row]:
    """Rows of trials that finish, and their folders."""

    def finish(trial: Trial) -> Row:
        folder_of(out, trial).mkdir(parents=True, exist_ok=True)
        (folder_of(out, trial) / "report.json").write_text("{}")
        row = {**_asked(trial), "status": "finished", "folder": f"trials/{trial.name}"}
        numbers = ("calibration_agreement", "mean_weight_bits", "file_bytes", "seconds")
        return {**row, **dict.fromkeys(numbers, 1.0)}

    return finish


def test_every_trial_gets_a_row_and_the_work_is_taken_away(tmp_path: Path) -> None:
    out, told = tmp_path / "out", []
    pool = Pretended(out, 2, done(out))
    some = trials(seed=[0, 1, 2])
    rows = run(some, out, lambda _: pool, on_row=lambda row, n, total: told.append((n, total)))
    assert sorted(row["seed"] for row in rows) == [0, 1, 2]
    assert read_results(out) == rows
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert pool.closed
    assert {path.name for path in out.iterdir()} == {FILE, "table.csv", "table.md", "trials"}


def test_work_is_kept_if_asked_for_and_while_a_trial_is_missing(tmp_path: Path) -> None:
    out = tmp_path / "kept"
    run(trials(seed=[0]), out, lambda _: Pretended(out, 1, done(out)), keep=True)
    assert (out / ".lampq").is_dir()
    out = tmp_path / "failed"
    run(trials(seed=[0]), out, lambda _: Pretended(out, 1, lambda t: failed_row(t, "x")))
    assert (out / ".lampq").is_dir()


def test_the_first_of_those_that_share_runs_before_the_others(tmp_path: Path) -> None:
    pool = Pretended(tmp_path, 3, done(tmp_path))
    run(trials(gamma=[2.0, 3.0, 4.0, 5.0]), tmp_path, lambda _: pool)
    assert [bool(beside) for beside in pool.beside] == [False, False, True, True]


def test_trials_that_share_nothing_run_side_by_side(tmp_path: Path) -> None:
    pool = Pretended(tmp_path, 3, done(tmp_path))
    run(trials(seed=[0, 1, 2]), tmp_path, lambda _: pool)
    assert [len(beside) for beside in pool.beside] == [0, 1, 2]


def test_a_trial_whose_worker_dies_is_run_again_and_nothing_is_lost(tmp_path: Path) -> None:
    finish, deaths = done(tmp_path), [Death("signal 9 (SIGKILL)")] * 2
    pool = Pretended(tmp_path, 1, lambda t: deaths.pop() if t.config.seed and deaths else finish(t))
    rows = run(trials(seed=[0, 1, 2]), tmp_path, lambda _: pool)
    assert {(row["seed"], row["status"], row["attempts"]) for row in rows} == {
        *((0, "finished", 1), (1, "finished", 3), (2, "finished", 1)),
    }


def test_a_trial_that_kills_every_worker_fails_and_the_others_go_on(tmp_path: Path) -> None:
    finish, death = done(tmp_path), Death("signal 9 (SIGKILL)")
    pool = Pretended(tmp_path, 2, lambda t: death if t.config.seed == 1 else finish(t))
    rows = run(trials(seed=[0, 1, 2]), tmp_path, lambda _: pool)
    found = {row["seed"]: row for row in rows}
    assert [found[seed]["status"] for seed in (0, 1, 2)] == ["finished", "failed", "finished"]
    assert found[1]["failure"] == "3 workers died of it, at last by signal 9 (SIGKILL)"
    assert found[1]["attempts"] == 3


def test_an_interrupted_sweep_goes_on_and_repeats_nothing_finished(tmp_path: Path) -> None:
    finish = done(tmp_path)

    def interrupted(trial: Trial) -> Row:
        if trial.config.seed == 2:
            raise KeyboardInterrupt
        return finish(trial)

    first, some = Pretended(tmp_path, 1, interrupted), trials(seed=[0, 1, 2, 3])
    with pytest.raises(KeyboardInterrupt):
        run(some, tmp_path, lambda _: first)
    assert first.closed
    assert [row["seed"] for row in read_results(tmp_path)] == [0, 1]
    with pytest.raises(ConfigError, match="already holds a sweep: continue it with --resume"):
        run(some, tmp_path, lambda _: first)
    again = Pretended(tmp_path, 1, finish)
    rows = run(some, tmp_path, lambda _: again, resume=True)
    assert [trial.config.seed for trial in again.started] == [2, 3]
    assert [row["seed"] for row in rows] == [0, 1, 2, 3]


def test_trials_can_be_added_and_failed_ones_are_tried_again(tmp_path: Path) -> None:
    finish = done(tmp_path)
    pool = Pretended(tmp_path, 1, lambda t: failed_row(t, "x") if t.config.seed else finish(t))
    run(trials(seed=[0, 1]), tmp_path, lambda _: pool)
    again = Pretended(tmp_path, 1, finish)
    rows = run(trials(seed=[0, 1, 5]), tmp_path, lambda _: again, resume=True)
    assert [trial.config.seed for trial in again.started] == [1, 5]
    assert {row["status"] for row in rows} == {"finished"}
    nobody = Pretended(tmp_path, 1, finish)
    assert run(trials(seed=[0, 1, 5]), tmp_path, lambda _: nobody, resume=True) == rows
    assert nobody.started == []


def test_a_trial_whose_folder_is_gone_is_run_again(tmp_path: Path) -> None:
    some = trials(seed=[0, 1])
    run(some, tmp_path, lambda _: Pretended(tmp_path, 1, done(tmp_path)))
    (folder_of(tmp_path, some[1]) / "report.json").unlink()
    again = Pretended(tmp_path, 1, done(tmp_path))
    run(some, tmp_path, lambda _: again, resume=True)
    assert again.started == [some[1]]


def test_two_sweeps_do_not_work_in_one_folder(tmp_path: Path) -> None:
    @contextmanager
    def another() -> Iterator[None]:
        with _alone(tmp_path / ".lampq"):
            yield

    pool = Pretended(tmp_path, 1, done(tmp_path))
    with another(), pytest.raises(ConfigError, match="another lampq sweep is at work"):
        run(trials(seed=[0]), tmp_path, lambda _: pool)
    assert run(trials(seed=[0]), tmp_path, lambda _: pool)


def test_folders_of_other_runs_and_of_other_versions_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="holds no sweep to resume"):
        check_folder(tmp_path, resume=True)
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds another run"):
        check_folder(tmp_path, resume=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file, not a folder"):
        check_folder(tmp_path / "file", resume=False)
    out = tmp_path / "out"
    run(trials(seed=[0]), out, lambda _: Pretended(out, 1, done(out)))
    monkeypatch.setattr("lampq.sweep.schedule.__version__", "99.0")
    with pytest.raises(ConfigError, match=r"was begun by lampq .*, this is 99\.0"):
        check_folder(out, resume=True)
