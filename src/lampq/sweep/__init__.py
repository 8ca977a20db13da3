"""Many trials over grids and lists of options: run folders, one table, shared work."""

from __future__ import annotations

from lampq.sweep.asked import Trial, check, read_sweep
from lampq.sweep.pool import Here, Pool, Processes
from lampq.sweep.results import best, read_results
from lampq.sweep.schedule import check_folder, run

__all__ = [
    "Here",
    "Pool",
    "Processes",
    "Trial",
    "best",
    "check",
    "check_folder",
    "read_results",
    "read_sweep",
    "run",
]
