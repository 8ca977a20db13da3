"""The trials of a sweep on a Ray cluster."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from lampq.errors import ConfigError, MissingDependencyError
from lampq.report.table import Row
from lampq.sweep.asked import Trial
from lampq.sweep.pool import Death
from lampq.sweep.trial import work_on

LOCAL = "local"


class RayPool:
    """Tasks of a Ray cluster, one processor each.

    The folder of the sweep must be the same on all of its machines. ``address``: that of a running
    cluster, "auto" for the one of this machine, or "local" to start one.
    """

    def __init__(self, address: str, out: Path, size: int | None = None) -> None:
        try:
            import ray
        except ImportError as error:
            raise MissingDependencyError(
                "--ray needs the package ray: pip install 'lampq[ray]'"
            ) from error
        self._ray: Any = ray
        self._out = out.absolute()
        where = {"include_dashboard": False} if address == LOCAL else {"address": address}
        try:
            ray.init(**where, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError, OSError, TimeoutError) as error:
            first = " ".join(str(error).split())[:200]
            raise ConfigError(f"no Ray cluster at {address!r}: {first}") from error
        there = int(ray.cluster_resources().get("CPU", 1))
        self.size = max(1, there if size is None else size)
        # a trial of a dead worker is given out again by the sweep, which counts
        self._task = ray.remote(num_cpus=1, max_retries=0)(work_on)
        self._running: dict[Any, Trial] = {}

    def start(self, trial: Trial) -> None:
        """Submit a trial."""
        self._running[self._task.remote(self._out, trial)] = trial

    def wait(self) -> tuple[Trial, Row | Death]:
        """The next trial that ends, by its row or with its worker."""
        (done, *_), _ = self._ray.wait(list(self._running), num_returns=1)
        trial = self._running.pop(done)
        try:
            row: Row = self._ray.get(done)
        except self._ray.exceptions.RayError as error:
            return trial, Death(" ".join(f"{type(error).__name__}: {error}".split())[:200])
        return trial, row

    def close(self) -> None:
        """Cancel what is running and leave the cluster."""
        for task in self._running:
            self._ray.cancel(task, force=True)
        self._running.clear()
        self._ray.shutdown()
