"""The accuracy table of docs/reproduction.md: one JSON line per row, resumable.

python benchmarks/reproduce.py --results runs/reproduction.jsonl [--only best] [--threads 2]
python benchmarks/reproduce.py --results runs/reproduction.jsonl --only distill --iterations 7000
python benchmarks/reproduce.py --results runs/reproduction.jsonl --table
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import real
import torch
from rows import Row, command_line, compute, read, spread

from lampq.allocate import random_plan
from lampq.artifact.fits import FitFolder
from lampq.artifact.states import StateFolder
from lampq.config import EVEN, make_config
from lampq.data import Samples
from lampq.evaluate import divergence, predict, top1
from lampq.models import LoadedModel
from lampq.pipeline import Result, quantize
from lampq.progress import Journal, Progress
from lampq.scoring import Run
from lampq.types import BitPlan, Budget

# what `best` can do without
EARLIER: dict[str, dict[str, Any]] = {
    "static ranges, one width for all tokens": EVEN,
    "one width for all tokens": {"prefix_bits": "target"},
}


class Bench:
    """Model, images and float logits, loaded once; of the evaluation images so many, or all."""

    def __init__(self, work: Path, evaluation: int | None = None) -> None:
        self.work = work
        self.loaded: LoadedModel = real.model()
        self.calibration: Samples = real.calibration()
        self.evaluation: Samples = real.evaluation()
        if evaluation is not None:
            self.evaluation = self.evaluation.subset(evaluation, 0)
        self.logits = predict(self.loaded.model, self.evaluation)

    def score(self, model: torch.nn.Module) -> Row:
        """Accuracy and divergence on the evaluation images."""
        logits = predict(model, self.evaluation)
        labels = self.evaluation.require_labels("an accuracy")
        same = (logits.argmax(1) == self.logits.argmax(1)).double().mean()
        return {
            "top1": top1(logits, labels),
            "top1_first_1000": top1(logits[:1000], labels[:1000]),
            "agree": 100 * float(same),
            "kl": divergence(logits, self.logits),
            "images": len(labels),
        }

    def run(self, **options: Any) -> tuple[Result, Progress]:
        """One run on the calibration images.

        Runs of one method, preset and seed share their fits and measures: these do not depend on
        the target. Nor do scores of plans get mixed up, as a plan has the mean width of its target.
        """
        progress, config = Progress(), make_config(options)
        shared = [config.method, config.preset, config.fit_inputs, str(config.seed)]
        shared += [config.input_ranges, f"first {config.prefix_bits}"]
        steps = "" if config.iterations is None else f" {config.iterations} steps"
        folder = self.work / " ".join(shared)
        folder.mkdir(parents=True, exist_ok=True)
        run = Run(
            progress,
            Journal(folder / "journal.jsonl"),
            FitFolder(folder / "fits"),
            states=StateFolder(folder / f"states {config.reconstruct} {config.bits:g}{steps}"),
        )
        result = quantize(self.loaded.model, self.calibration, config=config, run=run)
        return result, progress


def uniform(bench: Bench, method: str, bits: int, seed: int, inputs: str = "published") -> Row:
    """All layers, patch embedding and head at one width, by the method as published."""
    result, progress = bench.run(
        preset="paper",
        method=method,
        bits=bits,
        seed=seed,
        choices=(bits,),
        metric="recon",
        exchanges=0,
        score_images=16,
        fit_inputs=inputs,
    )
    return {**bench.score(result.model), "seconds": sum(progress.seconds.values())}


def mixed(
    bench: Bench,
    preset: str,
    bits: int,
    seed: int,
    reconstruct: str | None = None,
    **options: Any,
) -> Row:
    """A preset's plan, and for `best` the uniform plan of the same options.

    For `paper` that is the row of the uniform method. With a reconstruction only the mixed plan.
    """
    result, progress = bench.run(
        preset=preset, bits=bits, seed=seed, reconstruct=reconstruct, **options
    )
    alone = preset == "best" and reconstruct is None
    return {
        **bench.score(result.model),
        **({"uniform": bench.score(result.uniform_model())} if alone else {}),
        "calibration_kl": {k: -q.agreement for k, q in result.calibration.items()},
        "mean_weight_bits": result.plan.mean_weight_bits,
        "mean_activation_bits": result.plan.mean_activation_bits,
        "widths": [b.weight for b in result.plan.widths],
        "accepted": sum(step.accepted for step in result.steps),
        "attempted": len(result.steps),
        "seconds": sum(progress.seconds.values()),
        "stages": dict(progress.seconds),
        "reconstruction": None
        if result.reconstruction is None
        else [-quality.agreement for quality in result.reconstruction.stages],
        "notices": list(result.notices),
    }


def randoms(bench: Bench, bits: int, draws: int) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Random plans of equal budget, as a control."""
    cache: list[Result] = []

    def score(draw: int) -> Row:
        if not cache:
            cache.append(bench.run(bits=bits, choices=(bits,), metric="recon", exchanges=0)[0])
        base = cache[0]
        choices = make_config({"bits": bits}).widths
        plan: BitPlan = random_plan(base.graph.allocatable, choices, Budget(bits), draw)
        model = base.of_plan(plan)
        return {**bench.score(model), "mean_weight_bits": plan.mean_weight_bits}

    for draw in range(draws):
        yield f"random {bits} draw {draw}", partial(score, draw)


def jobs(bench: Bench, iterations: int | None) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Every row of the table, by key, most wanted first."""
    yield "fp32", lambda: bench.score(bench.loaded.model)
    for bits in (4, 3):
        for method in ("adalog", "repq", "minmax"):
            yield (
                f"uniform {method} {bits} seed 0",
                partial(uniform, bench, method, bits, 0),
            )
    for seed in range(3):
        for preset in ("best", "paper"):
            for bits in (4, 3):
                yield (
                    f"{preset} {bits} seed {seed}",
                    partial(mixed, bench, preset, bits, seed),
                )
    for bits in (3, 4):
        yield (
            f"best with align {bits} seed 0",
            partial(mixed, bench, "best", bits, 0, "align"),
        )
    steps = "" if iterations is None else f" ({iterations:,} steps)"
    for bits in (3, 4):
        yield (
            f"best with distill {bits} seed 0{steps}",
            partial(mixed, bench, "best", bits, 0, "distill", iterations=iterations),
        )
    for name, options in EARLIER.items():
        for also in (None, "align"):
            for bits in (3, 4):
                done = "" if also is None else f" with {also}"
                yield (
                    f"best, {name}{done} {bits} seed 0",
                    partial(mixed, bench, "best", bits, 0, also, **options),
                )
    yield from randoms(bench, 3, 10)
    for seed in (1, 2):
        for bits in (4, 3):
            for method in ("adalog", "repq", "minmax"):
                yield (
                    f"uniform {method} {bits} seed {seed}",
                    partial(uniform, bench, method, bits, seed),
                )
    for seed in range(2):
        yield (
            f"uniform repq 4 on float inputs seed {seed}",
            partial(uniform, bench, "repq", 4, seed, "float"),
        )


def table(rows: list[Row]) -> str:
    """Mean and range over seeds or draws, then every row, as Markdown tables."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(re.sub(r" (seed|draw) \d+( edge target)?", "", row["key"]), []).append(
            row
        )
    lines = [
        "| | rows | top-1 | uniform, same options | KL |",
        "|---|---|---|---|---|",
    ]
    for name, members in groups.items():
        own = [row["uniform"]["top1"] for row in members if "uniform" in row]
        cells = [
            spread([row["top1"] for row in members], 2),
            spread(own, 2) if own else "",
            spread([row["kl"] for row in members], 3),
        ]
        lines.append(f"| {name} | {len(members)} | {' | '.join(cells)} |")
    lines += [
        "",
        "| row | top-1 | first 1,000 | uniform, same options | agree | KL | weight bits "
        "| input bits | exchanges | date |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        plain = f"{row['uniform']['top1']:.2f}" if "uniform" in row else ""
        weight, inputs = (
            f"{row[key]:.3f}" if key in row else ""
            for key in ("mean_weight_bits", "mean_activation_bits")
        )
        tried = f"{row['accepted']} of {row['attempted']}" if "attempted" in row else ""
        lines.append(
            f"| {row['key']} | {row['top1']:.2f} "
            f"| {row['top1_first_1000']:.1f} | {plain} | {row['agree']:.1f} | {row['kl']:.3f} "
            f"| {weight} | {inputs} | {tried} | {row['date']} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Compute the rows that the results file does not have yet, or print them."""
    parser = command_line(__doc__, Path("runs/reproduction.jsonl"))
    parser.add_argument("--iterations", type=int, help="training steps of distillation")
    options = parser.parse_args()
    if options.table:
        print(table(sorted(read(options.results), key=lambda row: str(row["key"]))))
        return
    work = options.results.with_suffix(".work")
    compute(options, lambda: jobs(Bench(work), options.iterations))


if __name__ == "__main__":
    main()
