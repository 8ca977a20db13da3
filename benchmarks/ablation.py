"""What each option of the preset `best` brings, on calibration images alone.

python benchmarks/ablation.py --results runs/ablation.jsonl [--seeds 3] [--only text]
python benchmarks/ablation.py --results runs/ablation.jsonl --table

The 1,000 calibration images are split by the seed: 800 are given to lampq, the divergence from the
float model is measured on the other 200. All models are uniform, with eight-bit edges.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import real
import torch

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


def measure(samples: Samples, bits: int, seed: int, options: dict[str, Any]) -> dict[str, float]:
    """Divergence and accuracy of one uniform model on the images that it has not seen."""
    model = real.model().model
    given, held = split(samples, seed)
    plain = {"choices": (bits,), "metric": "recon", "exchanges": 0, "score_images": 16}
    config = make_config({"bits": bits, "seed": seed, **plain, **options})
    logits = predict(quantize(model, given, config=config).model, held)
    assert held.labels is not None, "calibration images have labels"
    return {"kl": divergence(logits, predict(model, held)), "top1": top1(logits, held.labels)}


def jobs(seeds: int) -> Iterator[tuple[str, int, int]]:
    """Every row: name, width, seed."""
    for seed in range(seeds):
        for name in STEPS:
            for bits in (4, 3):
                yield name, bits, seed


def table(rows: list[dict[str, Any]]) -> str:
    """Mean and range over the seeds, in Markdown."""
    lines = ["| fits | KL at 4 bits | KL at 3 bits |", "|---|---|---|"]
    for name in STEPS:
        cells = []
        for bits in (4, 3):
            found = [row["kl"] for row in rows if (row["name"], row["bits"]) == (name, bits)]
            if found:
                spread = f"{min(found):.2f} to {max(found):.2f}"
                cells.append(f"{statistics.mean(found):.2f} ({spread})")
            else:
                cells.append("-")
        lines.append(f"| {name} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def main() -> None:
    """Compute the rows that the results file does not have yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("runs/ablation.jsonl"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="rows whose name contains this text")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--table", action="store_true", help="print the rows as Markdown")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    rows = [json.loads(line) for line in lines]
    if options.table:
        print(table(rows))
        return
    options.results.parent.mkdir(parents=True, exist_ok=True)
    done = {(row["name"], row["bits"], row["seed"]) for row in rows}
    samples = real.calibration()
    for name, bits, seed in jobs(options.seeds):
        if (name, bits, seed) in done or options.only not in name:
            continue
        row = {
            "name": name,
            "bits": bits,
            "seed": seed,
            **measure(samples, bits, seed, STEPS[name]),
        }
        row["date"] = datetime.now(UTC).date().isoformat()
        with options.results.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(row) + "\n")
        print(f"{name}, {bits} bits, seed {seed}: KL {row['kl']:.3f}", flush=True)


if __name__ == "__main__":
    main()
