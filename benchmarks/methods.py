"""Time of each method in float passes over the calibration images: one JSON line per method.

All sites at four bits, options of the preset `paper`. The float pass is timed in the same process,
before and after each method. On one thread it is CPU time, on more it is wall time.

python benchmarks/methods.py --results runs/methods.jsonl [--only adalog] [--threads 1]
python benchmarks/methods.py --results runs/methods.jsonl --table
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import real
import torch
from overhead import seconds_of_a_pass
from rows import Row, clock, command_line, compute, read

from lampq.compare import make_trials
from lampq.data import Samples
from lampq.methods import METHODS
from lampq.models import LoadedModel
from lampq.pipeline import quantize
from lampq.progress import Progress
from lampq.scoring import Run

BITS = 4


def timed(method: str, loaded: LoadedModel, samples: Samples) -> Row:
    """Statistics and fits of one method, in float passes."""
    options = {"preset": "paper", "score_images": 16}
    (trial,) = make_trials(options, methods=(method,), plans=("uniform",), bits=(BITS,))
    before = seconds_of_a_pass(loaded.model, samples)
    now = clock()
    progress = Progress(now)
    start = now()
    quantize(loaded.model, samples, config=trial.config, run=Run(progress=progress))
    whole = now() - start
    one_pass = (before + seconds_of_a_pass(loaded.model, samples)) / 2
    collect, fit = (progress.seconds.get(stage, 0.0) for stage in ("collect", "fit"))
    return {
        "bits": BITS,
        "images": len(samples),
        "fit_images": trial.config.fit_images,
        "threads": torch.get_num_threads(),
        "seconds_per_pass": one_pass,
        "passes": (collect + fit) / one_pass,
        "passes_collect": collect / one_pass,
        "passes_fit": fit / one_pass,
        "passes_whole_run": whole / one_pass,
    }


def jobs() -> Iterator[tuple[str, Callable[[], Row]]]:
    """Every registered method, by name."""
    loaded, samples = real.model(), real.calibration()
    for method in METHODS:
        yield method, partial(timed, method, loaded, samples)


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    lines = ["| method | passes | statistics | fits | date |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['key']} | {row['passes']:.2f} | {row['passes_collect']:.2f} "
        f"| {row['passes_fit']:.2f} | {row['date']} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Time the methods that the results file does not have yet, or print them."""
    options = command_line(__doc__, Path("runs/methods.jsonl")).parse_args()
    if options.table:
        print(table(read(options.results)))
        return
    compute(options, jobs, lambda row: f"{row['passes']:.2f} float passes")


if __name__ == "__main__":
    main()
