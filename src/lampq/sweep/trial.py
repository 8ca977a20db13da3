"""One trial of a sweep, on the side that works: a run folder, and a row of the table."""

from __future__ import annotations

import os
import shutil
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, time

from lampq.data import Samples
from lampq.errors import LampqError
from lampq.inputs import calibration_samples, evaluation_samples
from lampq.models import LoadedModel
from lampq.progress import Progress
from lampq.report.folder import read_report
from lampq.report.table import Row
from lampq.runfolder import WORK, Job, check_labels, run_job
from lampq.sharing import Shared
from lampq.sweep.asked import TYPED, Trial
from lampq.sweep.results import failed_row, finished_row
from lampq.version import __version__

TRIALS = "trials"


def folder_of(out: Path, trial: Trial) -> Path:
    """Where the run folder of a trial is, once it is finished."""
    return out / TRIALS / trial.name


def is_finished(out: Path, trial: Trial) -> bool:
    """Whether the run folder of a trial is there; it appears as a whole."""
    return (folder_of(out, trial) / "report.json").is_file()


class Worker:
    """Runs trials one after another; keeps the model, the pictures and the fits of the last one.

    A trial works in a folder of its own, which gets its final name as a whole when it is finished.
    So a worker may be killed at any time, and two that have the same trial do not disturb each
    other. What it shares with other trials is in the work folder of the sweep.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.name = f"{socket.gethostname()}-{os.getpid()}"
        self.work = out / WORK
        self.shared = Shared(self.work / "shared" / __version__, self.name, statistics=True)
        self._loaded: tuple[tuple[object, ...], LoadedModel] | None = None
        self._samples: dict[str, tuple[tuple[object, ...], Samples | None]] = {}

    def run(self, trial: Trial, progress: Progress) -> Row:
        """The row of a trial; one with the error if it fails."""
        start = perf_counter()
        try:
            if not is_finished(self.out, trial):
                self._make(trial, progress)
            report = read_report(folder_of(self.out, trial))
        except Exception as error:  # whatever goes wrong in a trial, the others go on
            found = failed_row(trial, _told(error), _traceback(error))
        else:
            found = finished_row(trial, report, f"{TRIALS}/{trial.name}")
        seconds = perf_counter() - start
        return {**found, "seconds": seconds, "worker": self.name, "ended": time()}

    def _make(self, trial: Trial, progress: Progress) -> None:
        loaded = self._model(trial)
        how = trial.preprocessing(loaded)
        config = trial.config
        typed = [trial.inputs[name] for name in TYPED]
        calib, evaluation = trial.path("calib"), trial.path("eval")
        samples = self._read(
            "calib",
            (trial.inputs["model"], calib, *typed, config.images, config.seed),
            lambda: calibration_samples(calib, how, config.images, config.seed, progress),
        )
        scored = self._read(
            "eval",
            (trial.inputs["model"], calib is None, evaluation, *typed),
            lambda: evaluation_samples(loaded, calib, evaluation, how, progress),
        )
        assert samples is not None, "a run has calibration pictures"
        for some in (samples, scored):
            if some is not None:
                check_labels(some, loaded.model)
        inputs = {n: v if n in TYPED else str(v) for n, v in trial.inputs.items()}
        model, source = loaded.model, loaded.source
        job = Job(model, source, samples, scored, config, trial.plan, how, inputs)
        attempt = self.work / "attempts" / f"{trial.name}.{self.name}"
        shutil.rmtree(attempt, ignore_errors=True)
        run_job(job, attempt, self.work / "states" / trial.key, progress, self.shared)
        self._finish(attempt, folder_of(self.out, trial))

    def _finish(self, attempt: Path, folder: Path) -> None:
        """Give a finished run folder its name, unless another worker was first."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            attempt.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
            shutil.rmtree(attempt, ignore_errors=True)

    def _model(self, trial: Trial) -> LoadedModel:
        key = (trial.inputs["model"], trial.inputs["weights"])
        if self._loaded is None or self._loaded[0] != key:
            self._loaded = (key, trial.load())
        return self._loaded[1]

    def _read(
        self, split: str, key: tuple[object, ...], read: Callable[[], Samples | None]
    ) -> Samples | None:
        """Pictures, those of the last trial if they are the same."""
        known = self._samples.get(split)
        if known is None or known[0] != key:
            known = self._samples[split] = (key, read())
        return known[1]


def _traceback(error: Exception) -> str | None:
    """Where an error came from that lampq has no sentence for."""
    return None if isinstance(error, LampqError) else "".join(traceback.format_exception(error))


def _told(error: Exception) -> str:
    """The error in one line."""
    if isinstance(error, LampqError):
        return str(error)
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


_workers: dict[Path, Worker] = {}


def work_on(out: Path, trial: Trial) -> Row:
    """The row of a trial, by the worker that this process has for the folder."""
    return _workers.setdefault(out, Worker(out)).run(trial, Progress())
