"""The sweep itself: which trial runs next, and what becomes of its row."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from lampq.artifact.checkpoint import write_atomically
from lampq.errors import ConfigError
from lampq.report.table import Row
from lampq.runfolder import RESULTS, WORK
from lampq.sweep.asked import Trial
from lampq.sweep.pool import Death, Pool
from lampq.sweep.results import (
    FILE,
    Results,
    failed_row,
    results_csv,
    results_markdown,
)
from lampq.sweep.trial import is_finished
from lampq.version import __version__

# workers that may die of one trial before it counts as failed
LIVES = 3
OnRow = Callable[[Row, int, int], None]


def check_folder(out: Path, *, resume: bool) -> None:
    """Raise if a sweep cannot be started, or with ``resume`` continued, in that folder."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {str(out)!r} is a file, not a folder")
    there = (out / FILE).exists()
    if any((out / name).exists() for name in RESULTS if name != FILE):
        raise ConfigError(f"{str(out)!r} holds another run: choose another --out")
    if resume and not there:
        raise ConfigError(f"{str(out)!r} holds no sweep to resume")
    if there and not resume:
        raise ConfigError(
            f"{str(out)!r} already holds a sweep: continue it with --resume, or choose another "
            "--out"
        )
    if there:
        begun = {row["lampq"] for row in Results(out / FILE).rows()} - {__version__}
        if begun:
            raise ConfigError(
                f"the sweep in {str(out)!r} was begun by lampq {min(begun)}, this is "
                f"{__version__}: choose another --out"
            )


@contextmanager
def _alone(work: Path) -> Iterator[None]:
    """The only sweep in a folder; the lock ends with the process, however that ends."""
    work.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(work / "lock.sqlite", timeout=0, isolation_level=None)) as lock:
        try:
            lock.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            raise ConfigError(
                f"another lampq sweep is at work in {str(work.parent)!r}: wait until it has ended"
            ) from error
        yield


def run(
    trials: Sequence[Trial],
    out: Path,
    make_pool: Callable[[int], Pool],
    *,
    resume: bool = False,
    keep: bool = False,
    on_row: OnRow = lambda row, done, total: None,
) -> list[Row]:
    """Run the trials that have no finished run folder in ``out`` yet; the rows of the table.

    Args:
        trials: From ``read_sweep``.
        out: The folder of the sweep.
        make_pool: Gives who runs the trials, told how many there are to run.
        resume: Go on in a folder that holds a sweep; its file may have changed.
        keep: Keep fits and statistics for trials that are added later.
        on_row: Is told every new row, and how many of all trials have one.
    """
    check_folder(out, resume=resume)
    work = out / WORK
    with _alone(work):
        results = Results(out / FILE)
        results.create()
        known = {row["trial"]: row for row in results.rows() if row["status"] == "finished"}
        waiting = [t for t in trials if not (t.key in known and is_finished(out, t))]
        asked = {trial.key for trial in trials}
        done = len(trials) - len(waiting)
        opened = {trial.share for trial in trials if trial not in waiting}
        for row in _rows(_by_sharing(waiting), opened, make_pool):
            results.put(row)
            _write(results, out)
            done += 1
            on_row(row, done, len(trials))
        rows = results.rows()
        _write(results, out)
    if not keep and all(row["status"] == "finished" for row in rows if row["trial"] in asked):
        shutil.rmtree(work, ignore_errors=True)
    return rows


def _write(results: Results, out: Path) -> None:
    rows = results.rows()
    write_atomically(out / "table.csv", results_csv(rows).encode())
    if rows:
        write_atomically(out / "table.md", results_markdown(rows).encode())


def _by_sharing(trials: Sequence[Trial]) -> list[Trial]:
    """The trials with those that share next to each other, else in their order."""
    shares = [trial.share for trial in trials]
    order = sorted(range(len(trials)), key=lambda i: (shares.index(shares[i]), i))
    return [trials[i] for i in order]


def _rows(trials: list[Trial], opened: set[str], make_pool: Callable[[int], Pool]) -> Iterator[Row]:
    """The rows of the trials, as they end.

    The first of the trials that share runs alone, so that the others find its fits: ``opened`` are
    the shares that have a finished trial. A trial whose worker died is started again.
    """
    if not trials:
        return
    pool = make_pool(len(trials))
    waiting, running = list(trials), dict[str, str]()
    attempts: dict[str, int] = {}
    try:
        while waiting or running:
            while len(running) < pool.size:
                free = [t for t in waiting if t.share in opened or t.share not in running.values()]
                if not free:
                    break
                waiting.remove(free[0])
                running[free[0].key] = free[0].share
                pool.start(free[0])
            trial, ended = pool.wait()
            del running[trial.key]
            attempts[trial.key] = attempts.get(trial.key, 0) + 1
            if isinstance(ended, Death):
                if attempts[trial.key] < LIVES:
                    waiting.insert(0, trial)
                    continue
                ended = failed_row(trial, f"{LIVES} workers died of it, at last by {ended.reason}")
            opened.add(trial.share)
            yield {**ended, "attempts": attempts[trial.key]}
    finally:
        pool.close()
