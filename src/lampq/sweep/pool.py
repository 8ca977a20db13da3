"""Who runs the trials of a sweep: this process, or several on this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Protocol

import torch

from lampq.progress import Progress
from lampq.report.table import Row
from lampq.sweep.asked import Trial
from lampq.sweep.trial import Worker


@dataclass(frozen=True, slots=True)
class Death:
    """A worker ended in the middle of a trial."""

    reason: str


class Pool(Protocol):
    """Runs up to ``size`` trials at a time."""

    @property
    def size(self) -> int:
        """How many trials run at a time."""
        ...

    def start(self, trial: Trial) -> None:
        """Start a trial; fewer than ``size`` must be running."""
        ...

    def wait(self) -> tuple[Trial, Row | Death]:
        """The next trial that ends, and its row."""
        ...

    def close(self) -> None:
        """End all that is running."""
        ...


class Here:
    """This process, one trial after another, with its progress."""

    size = 1

    def __init__(self, out: Path, progress: Callable[[], Progress] = Progress) -> None:
        self._worker, self._progress = Worker(out), progress
        self._next: list[Trial] = []

    def start(self, trial: Trial) -> None:
        """Take a trial; ``wait`` runs it."""
        self._next.append(trial)

    def wait(self) -> tuple[Trial, Row | Death]:
        """Run the trial."""
        trial = self._next.pop()
        return trial, self._worker.run(trial, self._progress())

    def close(self) -> None:
        """Nothing goes on beside."""


@dataclass(slots=True)
class _Process:
    process: SpawnProcess
    connection: Connection[Trial, Row]
    trial: Trial | None = None
    share: str = ""


class Processes:
    """Processes of this machine, each on one thread; one that dies is replaced."""

    def __init__(self, out: Path, size: int) -> None:
        self.size, self._out = size, out
        self._context = multiprocessing.get_context("spawn")
        self._processes: list[_Process] = []

    def _new(self) -> _Process:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, self._out), daemon=True)
        process.start()
        theirs.close()
        made = _Process(process, ours)
        self._processes.append(made)
        return made

    def start(self, trial: Trial) -> None:
        """Give the trial to an idle process, one that has its fits in memory if there is one."""
        idle = [one for one in self._processes if one.trial is None]
        known = [one for one in idle if one.share == trial.share]
        if known:
            chosen = known[0]
        elif len(self._processes) < self.size:
            chosen = self._new()
        else:
            chosen = idle[0]
        chosen.trial, chosen.share = trial, trial.share
        with suppress(OSError):  # it died while it was idle, which wait() finds
            chosen.connection.send(trial)

    def wait(self) -> tuple[Trial, Row | Death]:
        """The next trial that ends, by its row or with its process."""
        while True:
            busy = [one for one in self._processes if one.trial is not None]
            wait([one.connection for one in busy] + [one.process.sentinel for one in busy])
            for one in busy:
                trial = one.trial
                assert trial is not None, "busy ones have a trial"
                # a row may be there although its process is gone
                ended = not one.process.is_alive()
                try:
                    if one.connection.poll():
                        row = one.connection.recv()
                        one.trial = None
                        return trial, row
                except (EOFError, OSError):
                    ended = True
                if ended:
                    one.process.join()
                    self._processes.remove(one)
                    return trial, Death(_cause(one.process.exitcode))

    def close(self) -> None:
        """End all processes; what they have written stays."""
        for one in self._processes:
            one.process.kill()
        for one in self._processes:
            one.process.join()
            one.connection.close()
        self._processes.clear()


def _cause(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {-code} ({signal.Signals(-code).name})"
    return f"exit code {code}"


def _serve(connection: Connection[Row, Trial], out: Path) -> None:
    """Run trials as they come, until there are no more or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C ends
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    worker = Worker(out)
    while True:
        try:
            connection.send(worker.run(connection.recv(), Progress()))
        except (EOFError, OSError):
            return


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "only run in processes of a pool"
    wait([parent.sentinel])
    os._exit(1)
