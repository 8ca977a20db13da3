"""What each option of the preset `best` brings, on calibration images alone.

python benchmarks/ablation.py --results runs/ablation.jsonl [--seeds 3] [--only text]
python benchmarks/ablation.py --results runs/ablation.jsonl --table

The 1,000 calibration images are split by the seed: 800 are given to lampq, the divergence from the
float model is measured on the other 200. All models are uniform, with eight-bit edges.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import real
import torch
from rows import Row, command_line, compute, read

from lampq.config import PRESETS, make_config
from lampq.data import Samples
from lampq.evaluate import divergence, predict, top1
from lampq.pipeline import quantize

FITS = ("rotation", "fit_images", "fit_tokens", "fold", "error")
PUBLISHED: dict[str, Any] = {name: PRESETS["paper"][name] for name in FITS}
STEPS: dict[str, dict[str, Any]] = {
    "as published": PUBLISHED,
    "published, 128 images": {**PUBLISHED, "fit_images": 128},
    "best": {},
    "best without rotation": {"rotation": "none"},
    "best with tokens drawn evenly": {"fit_tokens": "uniform"},
    "best with full folds": {"fold": "full"},
    "best with the plain error": {"error": "plain"},
    "best with 32 images": {"fit_images": 32},
    "best with 512 images": {"fit_images": 512},
    "best with gptq": {"compensation": "gptq"},
    "best with gptq, 512 images": {"compensation": "gptq", "fit_images": 512},
}


def split(samples: Samples, seed: int) -> tuple[Samples, Samples]:
    """Images to quantize with, and images to measure on."""
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(1000 + seed))
    assert samples.labels is not None, "calibration images have labels"
    first, second = (
        Samples(samples.images[part], samples.labels[part], samples.mean, samples.std)
        for part in (order[:-200], order[-200:])
    )
    return first, second


def measure(samples: Samples, bits: int, seed: int, options: dict[str, Any]) -> Row:
    """Divergence and accuracy of one uniform model on the images that it has not seen."""
    model = real.model().model
    given, held = split(samples, seed)
    plain = {"choices": (bits,), "metric": "recon", "exchanges": 0, "score_images": 16}
    config = make_config({"bits": bits, "seed": seed, **plain, **options})
    logits = predict(quantize(model, given, config=config).model, held)
    assert held.labels is not None, "calibration images have labels"
    return {"kl": divergence(logits, predict(model, held)), "top1": top1(logits, held.labels)}


def jobs(seeds: int) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Every row, by key."""
    samples = real.calibration()
    for seed in range(seeds):
        for name in STEPS:
            for bits in (4, 3):
                yield (
                    _key(name, bits, seed),
                    partial(measure, samples, bits, seed, STEPS[name]),
                )


def _key(name: str, bits: int, seed: int) -> str:
    return f"{name}, {bits} bits, seed {seed}"


def table(rows: list[Row]) -> str:
    """Mean and range over the seeds, in Markdown."""
    found = {row["key"]: row["kl"] for row in rows}
    lines = ["| fits | KL at 4 bits | KL at 3 bits |", "|---|---|---|"]
    for name in STEPS:
        cells = []
        for bits in (4, 3):
            keys = (_key(name, bits, seed) for seed in range(len(rows)))
            values = [found[key] for key in keys if key in found]
            cells.append(
                f"{statistics.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"
                if values
                else "-"
            )
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
    compute(options, lambda: jobs(options.seeds))


if __name__ == "__main__":
    main()
