"""Rows of a benchmark: one JSON line each, computed once, by key, resumable."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]
Jobs = Iterable[tuple[str, Callable[[], Row]]]


def command_line(description: str | None, default: Path) -> argparse.ArgumentParser:
    """The options that all benchmarks with a results file have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--results", type=Path, default=default)
    parser.add_argument("--only", default="", help="rows whose key contains this text")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--table", action="store_true", help="print the rows as Markdown")
    return parser


def clock() -> Callable[[], float]:
    """CPU time on one thread, so that a busy machine does not show; else wall time."""
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def read(results: Path) -> list[Row]:
    """The rows that are there."""
    if not results.exists():
        return []
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]


def spread(values: list[float], digits: int) -> str:
    """Mean and range, or the only value."""
    mean = f"{statistics.mean(values):.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _accuracy(row: Row) -> str:
    return f"top-1 {row['top1']:.2f}, KL {row['kl']:.3f}"


def compute(
    options: argparse.Namespace, jobs: Callable[[], Jobs], say: Callable[[Row], str] = _accuracy
) -> None:
    """Compute and append the rows that the results file does not have yet; ``say`` sums one up."""
    if options.threads:
        torch.set_num_threads(options.threads)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    done = {row["key"] for row in read(options.results)}
    for key, job in jobs():
        if key in done or options.only not in key:
            continue
        start = time.perf_counter()
        row = {"key": key, **job(), "date": datetime.now(UTC).date().isoformat()}
        with options.results.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(row) + "\n")
        done.add(key)
        seconds = time.perf_counter() - start
        print(f"{key}: {say(row)} ({seconds:.0f} s)", flush=True)
