"""Box and mask AP of the example detector, float and quantized: one JSON line per row, resumable.

python benchmarks/detection.py --results runs/detection.jsonl [--only "paper 3"] [--threads 1]
python benchmarks/detection.py --results runs/detection.jsonl --table

Calibration: 256 scenes of the bundled training items; evaluation: 500 scenes of the bundled test
items. The seed is that of the run: of its draws, not of the scenes. Time is in float passes over
the calibration scenes in the same process; on one thread it is CPU time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rows import Row, clock, command_line, compute, read, spread

from lampq.compare import PLANS
from lampq.config import make_config
from lampq.detection.ap import Detection, average_precision, detect
from lampq.detection.pictures import save_side_by_side
from lampq.detection.scenes import bundled_scenes
from lampq.detection.weights import load_detector
from lampq.pipeline import quantize
from lampq.progress import Progress
from lampq.scoring import Run

WEIGHTS = Path("examples/detector/scene_swin.safetensors")
KINDS = ("uniform", "vtptq", "paper", "best")


class Bench:
    """Detector and scenes, loaded once."""

    def __init__(self, work: Path, weights: Path, counts: tuple[int, int]) -> None:
        self.work = work
        self.model = load_detector("scene_swin", weights)
        self.calibration = bundled_scenes("calib", counts[0])
        self.evaluation = bundled_scenes("eval", counts[1])
        self.found: dict[str, list[Detection]] = {}

    def score(self, model: torch.nn.Module, key: str) -> Row:
        """Average precisions in percent on the evaluation scenes."""
        self.found[key] = detect(model, self.evaluation, batch=1)
        scores = average_precision(self.evaluation, self.found[key])
        row: Row = {"images": scores.images}
        for kind, one in (("box", scores.box), ("mask", scores.mask)):
            for name in ("ap", "ap50", "ap75", "small", "medium", "large"):
                value = getattr(one, name)
                row[f"{kind}_{name}"] = None if value is None else 100 * value
            row[f"{kind}_per_class"] = {
                k: None if v is None else 100 * v for k, v in one.per_class.items()
            }
        return row

    def seconds_of_a_pass(self) -> float:
        """Seconds in which the float detector answers the calibration scenes."""
        now = clock()
        start = now()
        detect(self.model, self.calibration, batch=1)
        return now() - start

    def draw(self, key: str) -> None:
        """Write a picture of the float detections beside those of a row."""
        if "fp32" not in self.found:
            self.found["fp32"] = detect(self.model, self.evaluation, batch=1)
        self.work.mkdir(parents=True, exist_ok=True)
        columns = {"fp32": self.found["fp32"], key: self.found[key]}
        save_side_by_side(self.work / f"{key}.png", self.evaluation, columns)


def options_of(kind: str, bits: int) -> dict[str, Any]:
    """The options of a row."""
    if kind == "uniform":
        plain = {"choices": (bits,), "metric": "recon", "exchanges": 0, "score_images": 16}
        return {"preset": "paper", **plain}
    if kind == "vtptq":
        return {"preset": "paper", **PLANS["vtptq"]}
    return {"preset": kind}


def quantized(bench: Bench, kind: str, bits: int, seed: int) -> Row:
    """One run, from the beginning, so that its time is that of a user."""
    key = f"{kind} {bits} seed {seed}"
    config = make_config(
        {"task": "detection", "bits": bits, "seed": seed, **options_of(kind, bits)}
    )
    now = clock()
    progress, start = Progress(now), now()
    result = quantize(bench.model, bench.calibration, config=config, run=Run(progress))
    whole = now() - start
    row = bench.score(result.model, key)
    if seed == 0:
        bench.draw(key)
    alone = kind == "best"
    return {
        **row,
        **({"uniform": bench.score(result.uniform_model(), f"{key} uniform")} if alone else {}),
        "calibration": {name: quality.to_json() for name, quality in result.calibration.items()},
        "mean_weight_bits": result.plan.mean_weight_bits,
        "mean_activation_bits": result.plan.mean_activation_bits,
        "widths": [width.weight for width in result.plan.widths],
        "accepted": sum(step.accepted for step in result.steps),
        "attempted": len(result.steps),
        "seconds": whole,
        "passes": whole / bench.seconds_of_a_pass(),
        "stages": dict(progress.seconds),
        "notices": list(result.notices),
    }


def jobs(bench: Bench, seeds: int) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Every row, by key, most wanted first."""
    yield "fp32", lambda: bench.score(bench.model, "fp32")
    for seed in range(seeds):
        for bits in (3, 4):
            for kind in KINDS:
                yield f"{kind} {bits} seed {seed}", partial(quantized, bench, kind, bits, seed)


def table(rows: list[Row]) -> str:
    """Mean and range over the seeds, as a Markdown table."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["key"].split(" seed ")[0], []).append(row)
    lines = [
        "| | seeds | box AP | mask AP | box AP, uniform with the same options | mask AP, the same "
        "| weight bits | float passes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, members in groups.items():
        own = [row["uniform"] for row in members if "uniform" in row]
        cells = [spread([row[key] for row in members], 1) for key in ("box_ap", "mask_ap")]
        cells += [
            spread([row[key] for row in own], 1) if own else "" for key in ("box_ap", "mask_ap")
        ]
        cells += [
            spread([row[key] for row in members], digits) if key in members[0] else ""
            for key, digits in (("mean_weight_bits", 3), ("passes", 1))
        ]
        lines.append(f"| {name} | {len(members)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Compute the rows that the results file does not have yet, or print them."""
    parser = command_line(__doc__, Path("runs/detection.jsonl"))
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--calibration", type=int, default=256, help="number of scenes")
    parser.add_argument("--evaluation", type=int, default=500, help="number of scenes")
    options = parser.parse_args()
    if options.table:
        print(table(sorted(read(options.results), key=lambda row: str(row["key"]))))
        return
    counts = (options.calibration, options.evaluation)

    def begun() -> Iterator[tuple[str, Callable[[], Row]]]:
        work = options.results.with_suffix(".work")
        return jobs(Bench(work, options.weights, counts), options.seeds)

    compute(options, begun, lambda row: f"box AP {row['box_ap']:.1f}, mask {row['mask_ap']:.1f}")


if __name__ == "__main__":
    main()
