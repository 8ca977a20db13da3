"""What each option of the preset `best` brings, on calibration images alone.

python benchmarks/ablation.py --results runs/ablation.jsonl [--seeds 3] [--only text]
python benchmarks/ablation.py --results runs/ablation.jsonl --table

The 1,000 calibration images are split by the seed: 800 are given to lampq, the divergence from the
float model is measured on the other 200. All models have eight-bit edges. The first table is of
uniform models, the second of the plans of each metric with the fits of `best`. "nearest" is `best`
on 128 images with weights rounded to nearest, without compensation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import real
from rows import Row, command_line, compute, read, spread

from lampq.artifact.fits import FitFolder
from lampq.config import PRESETS, make_config
from lampq.data import Samples
from lampq.evaluate import divergence, predict, top1
from lampq.pipeline import quantize
from lampq.scoring import Run

FITS = ("rotation", "fit_images", "fit_tokens", "fold", "error", "compensation")
PUBLISHED: dict[str, Any] = {name: PRESETS["paper"][name] for name in FITS}
NEAREST: dict[str, Any] = {"compensation": "none", "fit_images": 128}
STEPS: dict[str, dict[str, Any]] = {
    "as published": PUBLISHED,
    "published, 128 images": {**PUBLISHED, "fit_images": 128},
    "nearest": NEAREST,
    "nearest without rotation": {**NEAREST, "rotation": "none"},
    "nearest with tokens drawn evenly": {**NEAREST, "fit_tokens": "uniform"},
    "nearest with full folds": {**NEAREST, "fold": "full"},
    "nearest with the plain error": {**NEAREST, "error": "plain"},
    "nearest with 32 images": {**NEAREST, "fit_images": 32},
    "best with 128 images": {"fit_images": 128},
    "best": {},
    "best, aligned": {"reconstruct": "align"},
    "best, aligned with ridge 0.1": {"reconstruct": "align", "ridge": 0.1},
    "best, aligned with ridge 4": {"reconstruct": "align", "ridge": 4},
}

METRICS: dict[str, dict[str, Any]] = {
    "uniform": {"allocator": "uniform", "metric": "recon"},
    **{name: {"metric": name} for name in ("output", "recon", "hawq", "fisher", "kl")},
}


def measure(samples: Samples, bits: int, seed: int, options: dict[str, Any]) -> Row:
    """Divergence and accuracy of one uniform model on the images that it has not seen."""
    model = real.model().model
    given, held = samples.split(200, 1000 + seed)
    plain = {"choices": (bits,), "metric": "recon", "exchanges": 0, "score_images": 16}
    config = make_config({"bits": bits, "seed": seed, **plain, **options})
    logits = predict(quantize(model, given, config=config).model, held)
    labels = held.require_labels("an accuracy")
    return {"kl": divergence(logits, predict(model, held)), "top1": top1(logits, labels)}


def planned(samples: Samples, bits: int, seed: int, options: dict[str, Any], work: Path) -> Row:
    """The same of a mixed plan as the metric gives it, without exchanges.

    The plans of a seed share their fits.
    """
    model = real.model().model
    given, held = samples.split(200, 1000 + seed)
    plain = {"exchanges": 0, "start": "allocated", "fallback": "none", "score_images": 16}
    config = make_config({"bits": bits, "seed": seed, **plain, **options})
    folder = work / f"fits {seed}"
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(store=FitFolder(folder))
    logits = predict(quantize(model, given, config=config, run=run).model, held)
    labels = held.require_labels("an accuracy")
    return {"kl": divergence(logits, predict(model, held)), "top1": top1(logits, labels)}


def jobs(seeds: int, work: Path) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Every row, by key."""
    samples = real.calibration()
    for seed in range(seeds):
        for bits in (4, 3):
            for name, options in STEPS.items():
                yield _key(name, bits, seed), partial(measure, samples, bits, seed, options)
            for name, options in METRICS.items():
                key = _key(f"plan of {name}", bits, seed)
                yield key, partial(planned, samples, bits, seed, options, work)


def _key(name: str, bits: int, seed: int) -> str:
    return f"{name}, {bits} bits, seed {seed}"


def table(rows: list[Row]) -> str:
    """Mean and range over the seeds, in Markdown."""
    plans = [f"plan of {name}" for name in METRICS]
    return f"{_part(rows, 'fits', list(STEPS))}\n\n{_part(rows, 'plans', plans)}"


def _part(rows: list[Row], title: str, names: list[str]) -> str:
    found = {row["key"]: row["kl"] for row in rows}
    lines = [f"| {title} | KL at 4 bits | KL at 3 bits |", "|---|---|---|"]
    for name in names:
        cells = []
        for bits in (4, 3):
            keys = (_key(name, bits, seed) for seed in range(len(rows)))
            values = [found[key] for key in keys if key in found]
            cells.append(spread(values, 2) if values else "-")
        lines.append(f"| {name} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def main() -> None:
    """Compute the rows that the results file does not have yet, or print them."""
    parser = command_line(__doc__, Path("runs/ablation.jsonl"))
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    if options.table:
        print(table(read(options.results)))
        return
    compute(options, lambda: jobs(options.seeds, options.results.with_suffix(".work")))


if __name__ == "__main__":
    main()
