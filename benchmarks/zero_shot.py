"""Calibration without images against calibration on real ones: one JSON line per row, resumable.

python benchmarks/zero_shot.py --results runs/zero_shot.jsonl [--only "adalog 4/8"] [--threads 2]
python benchmarks/zero_shot.py --results runs/zero_shot.jsonl --table

Keys are `<images> <method> <weight>/<activation> <plan> seed <n>`, `ranking <images> seed <n>`,
`statistics <images> seed <n>` and `time <recipe>`. Of an interrupted row, pictures, fits and
measures are kept.

Images: noise (normal), psaq and pyramid (the recipes, both with --steps; pyramid makes twice as
many, half of which stay plain, so that both take about the same time), real (all calibration
pictures); at 4/8 also leaves (the start of pyramid, as it is) and psaq-published (32 pictures at
the published number of steps). Plans: uniform (the method as published), paper and best (LampQ by
that preset; the row of best has its uniform plan too). Another number of images, steps or
evaluation images needs another results file.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from reproduce import Bench
from rows import Row, command_line, compute, read, spread
from scipy.stats import spearmanr

from lampq.allocate import random_plan
from lampq.artifact.fits import FitFolder
from lampq.calibrate import LayerStats, collect
from lampq.config import MADE, make_config
from lampq.data import Samples
from lampq.evaluate import Quality, predict
from lampq.graph.discover import discover
from lampq.pipeline import Result, quantize
from lampq.progress import Journal, Progress
from lampq.scoring import Run
from lampq.types import Budget
from lampq.zero_shot import RECIPES, Synthesis, make_folder, read_made
from lampq.zero_shot.base import Subject
from lampq.zero_shot.canvas import Canvas
from lampq.zero_shot.leaves import dead_leaves
from lampq.zero_shot.painter import paint

SOURCES = ("pyramid", "psaq", "noise", "real")
MORE_SOURCES = ("leaves", "psaq-published")
WIDTHS = ((4, 8), (8, 8), (4, 4))
METHODS = ("adalog", "psaq")
# what zero-shot calibration promises: as good as real images, better than the published method
CLAIMED = (
    ("pyramid", "adalog", "best"),
    ("real", "adalog", "best"),
    ("psaq", "psaq", "uniform"),
)
TIMED_STEPS = 4
RANKED_PLANS, RANKED_IMAGES = 12, 1000


class ZeroBench(Bench):
    """Model, evaluation images, and images of every source by seed."""

    def __init__(self, work: Path, options: argparse.Namespace) -> None:
        super().__init__(work, options.evaluation)
        self.images, self.steps, self.batch = options.images, options.steps, options.batch
        self.canvas = Canvas(self.loaded.preprocessing)
        self.samples = cache(self._samples)

    def _samples(self, source: str, seed: int) -> Samples:
        generator = torch.Generator().manual_seed(seed)
        how = self.loaded.preprocessing
        if source == "real":
            return self.calibration
        if source == "noise":
            return Samples(torch.randn(self.canvas.shape(self.images), generator=generator))
        if source == "leaves":
            pictures = [
                dead_leaves(self.canvas.channels, how.size, generator) for _ in range(self.images)
            ]
            pixels = self.canvas.inputs(torch.stack(pictures))
            return Samples(self.canvas.to_bytes(pixels), None, how.mean, how.std)
        if source == "psaq-published":
            settings = Synthesis(32, "psaq", seed=seed)
        else:
            images = self.images * (2 if source == "pyramid" else 1)
            settings = Synthesis(images, source, self.steps, self.batch, seed)
        folder = self.work / "pictures" / f"{source} {seed}"
        make_folder(self.loaded, None, how, settings, folder)
        return read_made(folder, self.loaded.source, how)

    def run_on(self, source: str, **options: Any) -> tuple[Result, Progress]:
        """One run on the images of a source; fits and measures are shared as far as they go."""
        made = {} if source == "real" else MADE[options.get("preset", "best")]
        progress, config = Progress(), make_config({**made, **options})
        shared = (source, config.method, config.preset, str(config.seed))
        folder = self.work / " ".join(shared)
        folder.mkdir(parents=True, exist_ok=True)
        run = Run(progress, Journal(folder / "journal.jsonl"), FitFolder(folder / "fits"))
        samples = self.samples(source, config.seed)
        result = quantize(self.loaded.model, samples, config=config, run=run)
        return result, progress


def row(
    bench: ZeroBench, source: str, method: str, widths: tuple[int, int], plan: str, seed: int
) -> Row:
    """Accuracy of a plan; for `best` also of the uniform plan of the same options."""
    weight, activation = widths
    options: dict[str, Any] = {
        "preset": "paper" if plan == "uniform" else plan,
        "method": method,
        "bits": weight,
        "act_bits": activation,
        "seed": seed,
    }
    if plan == "uniform":
        options |= {"choices": (weight,), "metric": "recon", "exchanges": 0, "score_images": 16}
    result, progress = bench.run_on(source, **options)
    found = {
        **bench.score(result.model),
        "seconds": sum(progress.seconds.values()),
        "calibration_images": len(bench.samples(source, seed)),
        "notices": list(result.notices),
    }
    if plan == "uniform":
        return found
    return {
        **found,
        **({"uniform": bench.score(result.uniform_model())} if plan == "best" else {}),
        "mean_weight_bits": result.plan.mean_weight_bits,
        "mean_activation_bits": result.plan.mean_activation_bits,
        "widths": [bits.weight for bits in result.plan.widths],
        "accepted": sum(step.accepted for step in result.steps),
        "attempted": len(result.steps),
    }


def ranking(bench: ZeroBench, source: str, seed: int) -> Row:
    """Rank correlation of scores on the images with those on real ones, over random plans.

    Which of the scores on made pictures should decide on exchanges and role factors. The real ones
    are calibration images: a choice is made by them.
    """
    options = {"bits": 4, "act_bits": 8, "seed": seed, "exchanges": 0}
    result, _ = bench.run_on(source, choices=(4,), metric="recon", **options)
    choices = make_config({"choices": (3, 4, 5), **options}).widths
    exact = bench.calibration.subset(RANKED_IMAGES, 0)
    sets = [
        (some, predict(bench.loaded.model, some)) for some in (bench.samples(source, seed), exact)
    ]
    found: list[list[float]] = []
    for draw in range(RANKED_PLANS):
        plan = random_plan(result.graph.allocatable, choices, Budget(4), draw)
        model = result.of_plan(plan)
        ways = [Quality.of(predict(model, some), ref, some.labels) for some, ref in sets]
        found.append([value for way in ways for value in asdict(way).values()])
    names = [field.name for field in fields(Quality)]
    here, there = np.split(np.array(found), 2, axis=1)
    return {
        f"{name} for {wanted}": _rank_correlation(here[:, i], there[:, names.index(wanted)])
        for wanted in ("accuracy", "agreement")
        for i, name in enumerate(names)
    }


def _rank_correlation(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Spearman's; a score that is the same for all plans tells nothing."""
    varies = np.ptp(one) > 0 and np.ptp(other) > 0
    return float(spearmanr(one, other).statistic) if varies else 0.0


def statistics(bench: ZeroBench, source: str, seed: int) -> Row:
    """How far the inputs of the layers are from those on real images, in factors of two.

    Mean over layers of |log2| of the ratio of deviations and of largest magnitudes.
    """

    @cache
    def of(which: str) -> dict[str, tuple[float, float]]:
        subject = Subject.of(bench.loaded.model, bench.canvas)
        graph = discover(subject.model)
        few = bench.samples(which, seed).subset(64, seed)
        found = {}
        for name, stats in collect(subject.model, graph, few, max_maps=1, seed=seed).items():
            if isinstance(stats, LayerStats):
                found[name] = (float(stats.inputs.std()), float(stats.inputs.abs().amax()))
        return found

    def gap(part: int) -> float:
        ratios = [of(source)[name][part] / of("real")[name][part] for name in of("real")]
        return float(torch.tensor(ratios).log2().abs().mean())

    return {"deviation_gap": gap(0), "extreme_gap": gap(1)}


def timing(bench: ZeroBench, recipe_name: str) -> Row:
    """Time of 32 pictures in float passes over 32 pictures, from a few steps of one batch."""
    recipe = RECIPES.get(recipe_name)(steps=TIMED_STEPS)
    subject = Subject.of(bench.loaded.model, bench.canvas)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(bench.canvas.shape(32), generator=generator)

    def one_pass() -> float:
        start = time.perf_counter()
        with torch.no_grad():
            bench.loaded.model(images)
        return time.perf_counter() - start

    one_pass()
    before = one_pass()
    start = time.perf_counter()
    labels = recipe.labels(range(32), subject.classes, 0)
    painting = recipe.begin(subject, bench.canvas, labels, generator)
    begun = time.perf_counter() - start
    start = time.perf_counter()
    for _ in paint(subject, recipe, painting):
        pass
    step = (time.perf_counter() - start) / TIMED_STEPS
    unit = (before + one_pass()) / 2
    own = RECIPES.get(recipe_name)().steps
    return {
        "seconds_per_pass": unit,
        "passes_per_step": step / unit,
        "passes_to_begin": begun / unit,
        "steps": bench.steps,
        "passes": (begun + bench.steps * step) / unit,
        "default_steps": own,
        "passes_at_default_steps": (begun + own * step) / unit,
        "minutes_of_256": 8 * (begun + bench.steps * step) / 60,
        "threads": torch.get_num_threads(),
    }


def jobs(bench: ZeroBench, seeds: range) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Every row by key, most wanted first; some come up twice."""
    yield "fp32", lambda: bench.score(bench.loaded.model)
    for name in RECIPES:
        yield f"time {name}", partial(timing, bench, name)
    for seed in seeds:
        for source, method, plan in CLAIMED:
            yield accuracy(bench, source, method, WIDTHS[0], plan, seed)
    for seed in seeds:
        for widths, method, plan, source in product(WIDTHS, METHODS, ("uniform", "best"), SOURCES):
            yield accuracy(bench, source, method, widths, plan, seed)
        for source in SOURCES:
            if source != "real":
                yield f"statistics {source} seed {seed}", partial(statistics, bench, source, seed)
        for source in RECIPES:
            yield f"ranking {source} seed {seed}", partial(ranking, bench, source, seed)
    for seed, widths, method, source in product(seeds, WIDTHS, METHODS, SOURCES):
        yield accuracy(bench, source, method, widths, "paper", seed)
    for source in MORE_SOURCES:
        for method, plan in product(METHODS, ("uniform", "best")):
            yield accuracy(bench, source, method, (4, 8), plan, 0)
        yield f"statistics {source} seed 0", partial(statistics, bench, source, 0)


def accuracy(
    bench: ZeroBench, source: str, method: str, widths: tuple[int, int], plan: str, seed: int
) -> tuple[str, Callable[[], Row]]:
    """A row of accuracies with its key."""
    key = f"{source} {method} {widths[0]}/{widths[1]} {plan} seed {seed}"
    return key, partial(row, bench, source, method, widths, plan, seed)


def say(found: Row) -> str:
    """One line of a row."""
    if "top1" in found:
        return f"top-1 {found['top1']:.2f}, KL {found['kl']:.3f}"
    return ", ".join(f"{k} {v:.3g}" for k, v in found.items() if isinstance(v, float))


def table(rows: list[Row]) -> str:
    """Mean and range over seeds as Markdown tables: accuracy, ranking, statistics, time."""
    groups: dict[str, list[Row]] = {}
    for one in rows:
        groups.setdefault(re.sub(r" seed \d+", "", one["key"]), []).append(one)
    lines = ["| | rows | top-1 | uniform, same options | KL |", "|---|---|---|---|---|"]
    for name, members in groups.items():
        if "top1" not in members[0]:
            continue
        own = [one["uniform"]["top1"] for one in members if "uniform" in one]
        cells = [
            spread([one["top1"] for one in members], 2),
            spread(own, 2) if own else "",
            spread([one["kl"] for one in members], 3),
        ]
        lines.append(f"| {name} | {len(members)} | {' | '.join(cells)} |")
    lines += ["", "| | rank correlation |", "|---|---|"]
    for name, members in groups.items():
        for pair in (key for key in members[0] if " for " in key):
            found = spread([one[pair] for one in members], 2)
            lines.append(f"| {name.removeprefix('ranking ')}: {pair} | {found} |")
    lines += ["", "| | deviation, factors of two | largest, factors of two |", "|---|---|---|"]
    for name, members in groups.items():
        if "deviation_gap" in members[0]:
            cells = [spread([m[k] for m in members], 2) for k in ("deviation_gap", "extreme_gap")]
            lines.append(f"| {name.removeprefix('statistics ')} | {' | '.join(cells)} |")
    lines += ["", "| recipe | steps | passes of 32 images | a step | minutes of 256 |"]
    lines += ["|---|---|---|---|---|"]
    for name, (one, *_) in groups.items():
        if "passes_per_step" in one:
            lines.append(
                f"| {name.removeprefix('time ')} | {one['steps']} | {one['passes']:.0f} "
                f"| {one['passes_per_step']:.2f} | {one['minutes_of_256']:.0f} |"
            )
    return "\n".join(lines)


def options_of_the_command() -> argparse.Namespace:
    """The options of all such benchmarks, and those of the pictures."""
    parser = command_line(__doc__, Path("runs/zero_shot.jsonl"))
    parser.add_argument("--images", type=int, default=256, help="calibration images of a source")
    parser.add_argument("--steps", type=int, default=40, help="of both recipes")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--evaluation", type=int, help="evaluation images, drawn; all if not given")
    parser.add_argument("--seeds", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    """Compute the rows that the results file does not have yet, or print them."""
    options = options_of_the_command()
    if options.table:
        print(table(sorted(read(options.results), key=lambda one: str(one["key"]))))
        return
    size = f"{options.images} images {options.steps} steps"
    work = options.results.with_suffix(".work") / size
    compute(
        options,
        lambda: jobs(ZeroBench(work, options), range(options.seeds)),
        say,
    )


if __name__ == "__main__":
    main()
