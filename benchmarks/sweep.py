"""What a second trial costs that differs from the first in gamma alone, as a share of the first.

The second is run by a worker that has nothing of the first in memory, as another process would. On
one thread it is CPU time, so that a busy machine does not show; on more it is wall time. Evaluation
is counted apart: the accuracy on evaluation images, and the scores of plans on calibration images
that the exchanges ask for.

python benchmarks/sweep.py [--gammas 4,3] [--preset best] [--bits 4] [--exchanges 0] [--threads 1]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from rows import clock

from lampq.progress import Progress
from lampq.sweep import read_sweep
from lampq.sweep.trial import Worker


def trials(options: argparse.Namespace, folder: Path) -> Any:
    """One trial for each gamma, on the bundled model."""
    lines = [f'preset = "{options.preset}"', f"bits = {options.bits}", 'metric = "fisher"']
    if options.exchanges is not None:
        lines.append(f"exchanges = {options.exchanges}")
    lines += ["[grid]", f"gamma = [{options.gammas}]"]
    path = folder / "sweep.toml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return read_sweep(path)


def measured(trial: Any, out: Path) -> dict[str, float]:
    """Seconds of a trial and of its stages."""
    now = clock()
    progress = Progress(now)
    start = now()
    row = Worker(out).run(trial, progress)
    whole = now() - start
    if row["status"] != "finished":
        raise SystemExit(row["failure"])
    stages = {name: round(value, 3) for name, value in progress.seconds.items()}
    evaluation, scoring = stages.get("evaluate", 0.0), stages.get("refine", 0.0)
    return {
        "gamma": trial.config.gamma,
        "seconds": whole,
        "without_evaluation": whole - evaluation,
        "without_evaluation_and_exchanges": whole - evaluation - scoring,
        **{f"seconds_{name}": value for name, value in stages.items()},
    }


def main() -> None:
    """Run the trials and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gammas", default="4.0,3.0")
    parser.add_argument("--preset", default="best")
    parser.add_argument("--bits", type=float, default=4.0)
    parser.add_argument("--exchanges", type=int)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        found = [measured(trial, Path(folder) / "out") for trial in trials(options, Path(folder))]
    first = found[0]
    for one in found:
        print(json.dumps({k: round(v, 3) for k, v in one.items()}))
    for one in found[1:]:
        ratios = {
            name: round(one[name] / first[name], 3)
            for name in ("seconds", "without_evaluation", "without_evaluation_and_exchanges")
        }
        print(json.dumps({"gamma": one["gamma"], "against the first": ratios}))


if __name__ == "__main__":
    main()
