"""Many trials on one model and one pair of image sets, and one table of them.

A trial is a method, a way to find the widths, a budget, a seed, and a reconstruction or none.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from lampq.artifact.checkpoint import write_atomically
from lampq.artifact.states import StateFolder
from lampq.config import RunConfig, make_config
from lampq.data import AnySamples, Preprocessing, Samples
from lampq.errors import ConfigError, LampqError
from lampq.evaluate import interval95
from lampq.limits import budget_of
from lampq.models import FloatModel, LoadedModel
from lampq.pipeline import Result, packed, quantize
from lampq.prepare import prepare
from lampq.progress import Progress, append_line, read_lines
from lampq.report import STAGES
from lampq.report.table import Row, table_csv, table_json, table_markdown
from lampq.runfolder import check_labels, fingerprint_of, open_work, score
from lampq.scoring import Run
from lampq.sharing import Shared, sharing_key

RESULTS = "results.jsonl"
PLAIN: dict[str, Any] = {"exchanges": 0, "fallback": "none"}
METRIC_PLANS = ("nuclear", "hawq", "recon", "loss", "kl", "fisher", "output")
# how the widths of a trial are found: what each name changes in the common options
PLANS: dict[str, dict[str, Any]] = {
    "uniform": {"metric": "recon", "allocator": "uniform", **PLAIN},
    "random": {"metric": "recon", "allocator": "random", **PLAIN},
    "vtptq": {"metric": "nuclear", "allocator": "vtptq", **PLAIN},
    **{name: {"metric": name, "allocator": "ilp", **PLAIN} for name in METRIC_PLANS},
    **{f"{name}+exchanges": {"metric": name, "allocator": "ilp"} for name in METRIC_PLANS},
    "uniform+exchanges": {"metric": "recon", "allocator": "uniform"},
    "lampq": {},
}


@dataclass(frozen=True, slots=True)
class Trial:
    """One line of the table, and the options that give it."""

    method: str
    plan: str
    bits: float
    seed: int
    reconstruct: str | None
    config: RunConfig

    @property
    def key(self) -> Row:
        """What tells it from all others."""
        names = ("method", "plan", "bits", "seed", "reconstruct")
        return {name: getattr(self, name) for name in names}


def make_trials(
    options: Mapping[str, Any],
    *,
    methods: Sequence[str] = (),
    plans: Sequence[str] = ("uniform", "lampq"),
    bits: Sequence[float] = (),
    reconstruct: Sequence[str | None] = (),
    seeds: Sequence[int] = (),
    tasks: Collection[str] = ("classification",),
) -> tuple[Trial, ...]:
    """Every combination, in the order of the table; an empty list takes the common option.

    ``options`` are fields of RunConfig, common to all; their task must be one of ``tasks``.
    """
    common = make_config(options)
    if common.task not in tasks:
        raise ConfigError(f"a comparison is one of classifiers, not of {common.task}")
    for name in ("target_size", "target_bops"):
        if getattr(common, name) is not None:
            raise ConfigError(f"a comparison has its budgets from bits: leave {name} out")
    for plan in plans:
        if plan not in PLANS:
            raise ConfigError(f"unknown plan {plan!r}; known: {', '.join(PLANS)}")
    found = [
        Trial(method, plan, float(width), seed, finisher, _config({**options, **settings}, plan))
        for method in methods or (common.method,)
        for plan in plans
        for width in bits or (common.bits,)
        for finisher in reconstruct or (common.reconstruct,)
        for seed in seeds or (common.seed,)
        for settings in [
            {"method": method, "bits": width, "seed": seed, "reconstruct": finisher},
        ]
    ]
    keys = [json.dumps(trial.key) for trial in found]
    twice = [key for key in keys if keys.count(key) > 1]
    if twice:
        raise ConfigError(f"the same trial is asked for twice: {twice[0]}")
    return tuple(found)


def _config(options: Mapping[str, Any], plan: str) -> RunConfig:
    config = replace(make_config(options), **PLANS[plan])
    if plan != "uniform":
        return config
    # only the width that is used is fitted
    budget = budget_of(config)
    weight, activation = budget.mean_bits, budget.mean_activation_bits
    within = [
        bits
        for bits in config.widths
        if bits.weight <= weight and (activation is None or bits.activation <= activation)
    ]
    if not within:
        return config
    apart = None if config.joint else (within[-1].activation,)
    return replace(config, choices=(within[-1].weight,), act_choices=apart)


@dataclass(frozen=True, slots=True)
class Comparison:
    """All that one comparison works on.

    Attributes:
        loaded: The float model.
        calibration: Gives the calibration images of a seed.
        evaluation: The images that every trial is scored on.
        trials: What to run, in the order of the table.
        how: How pictures are prepared.
        inputs: Where model and images came from; a comparison is resumed only with the same.
    """

    loaded: LoadedModel
    calibration: Callable[[int], Samples]
    evaluation: Samples
    trials: tuple[Trial, ...]
    how: Preprocessing
    inputs: Mapping[str, Any]

    @property
    def float_bytes(self) -> int:
        """Four bytes for each parameter of the float model."""
        return 4 * sum(p.numel() for p in self.loaded.model.parameters())


def check(loaded: FloatModel, trials: Sequence[Trial]) -> None:
    """Raise what any trial would raise before it looks at an image."""
    for trial in trials:
        prepare(loaded.model, trial.config)


def run(
    comparison: Comparison,
    out: Path,
    *,
    resume: bool = False,
    progress: Callable[[], Progress] = Progress,
    on_row: Callable[[Row, int, int], None] = lambda row, done, total: None,
) -> dict[str, Any]:
    """Run the trials that ``out`` has no results of yet; the content of table.json.

    ``on_row`` is told every new row, and how many of all are done.
    """
    trials = comparison.trials
    if not trials:
        raise ConfigError("there is no trial to run")
    check(comparison.loaded, trials)
    what = {**comparison.inputs, "trials": [trial.config.to_json() for trial in trials]}
    work = open_work(out, fingerprint_of(trials[0].config, what), resume=resume)
    check_labels(comparison.evaluation, comparison.loaded.model)
    rows: list[Row] = read_lines(out / RESULTS)
    shared = Shared(work / "shared")

    def finish(row: Row) -> None:
        append_line(out / RESULTS, row)
        rows.append(row)
        _write(comparison, rows, out)
        on_row(row, len(rows), len(trials) + 1)

    if not rows:
        finish(_float_row(comparison, progress()))
    finished = [{name: row[name] for name in trials[0].key} for row in rows]
    for trial in by_sharing(trials):
        if trial.key in finished:
            continue
        states = work / "states" / hashlib.sha256(json.dumps(trial.key).encode()).hexdigest()[:24]
        finish(_trial_row(comparison, trial, shared, states, progress()))
        shutil.rmtree(states, ignore_errors=True)
    table = _write(comparison, rows, out)
    shutil.rmtree(work, ignore_errors=True)
    return table


def by_sharing(trials: Sequence[Trial]) -> list[Trial]:
    """The trials with those that share next to each other, else in their order; seed by seed."""
    keys = [sharing_key(trial.config) for trial in trials]
    seeds = [trial.seed for trial in trials]
    order = sorted(
        range(len(trials)), key=lambda i: (seeds.index(seeds[i]), keys.index(keys[i]), i)
    )
    return [trials[i] for i in order]


def _write(comparison: Comparison, rows: Sequence[Row], out: Path) -> dict[str, Any]:
    """Write the tables of the rows there are, in the order of the trials."""
    place = {json.dumps(trial.key): i for i, trial in enumerate(comparison.trials)}
    names = comparison.trials[0].key

    def order(row: Row) -> int:
        return place.get(json.dumps({name: row[name] for name in names}), -1)

    ordered = sorted(rows, key=order)
    about = {"model": comparison.loaded.source.to_json(), "inputs": dict(comparison.inputs)}
    options = comparison.trials[0].config.to_json()
    table = table_json(ordered, about=about, preset=options["preset"])
    texts = {
        "table.md": table_markdown(table),
        "table.csv": table_csv(ordered),
        "table.json": json.dumps(table, indent=2) + "\n",
    }
    for name, text in texts.items():
        write_atomically(out / name, text.encode())
    return table


def _float_row(comparison: Comparison, progress: Progress) -> Row:
    start = perf_counter()
    with progress.stage("evaluate"):
        found = score(comparison.loaded.model, comparison.evaluation, progress, "scoring fp32")
    size = comparison.float_bytes
    return {
        "method": "fp32",
        "plan": None,
        "bits": 32.0,
        "seed": None,
        "reconstruct": None,
        **accuracy(found),
        "mean_weight_bits": 32.0,
        "mean_activation_bits": 32.0,
        "file_bytes": size,
        "smaller": 1.0,
        **_seconds(progress, perf_counter() - start),
        "calibration": None,
        "notices": [],
    }


def quantized(loaded: FloatModel, samples: AnySamples, config: RunConfig, run: Run) -> Result:
    """The result of one trial; what it warns of is in its notices."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return quantize(loaded.model, samples, config=config, run=run)


def _trial_row(
    comparison: Comparison, trial: Trial, shared: Shared, states: Path, progress: Progress
) -> Row:
    """The row of one trial; one with the sentence of the error if it fails."""
    start = perf_counter()
    loaded, config = comparison.loaded, trial.config
    try:
        samples = comparison.calibration(trial.seed)
        check_labels(samples, loaded.model)
        beside = replace(shared.run(config, progress), states=StateFolder(states))
        result = quantized(loaded, samples, config, beside)
        name = f"scoring {trial.method} {trial.plan}"
        with progress.stage("evaluate"):
            found = score(result.model, comparison.evaluation, progress, name)
    except LampqError as error:
        return {**trial.key, "error": str(error), "seconds": perf_counter() - start}
    size = len(packed(result.model, loaded.source, result.plan, config, comparison.how))
    return {
        **trial.key,
        **accuracy(found),
        "mean_weight_bits": result.plan.mean_weight_bits,
        "mean_activation_bits": result.plan.mean_activation_bits,
        "file_bytes": size,
        "smaller": comparison.float_bytes / size,
        **_seconds(progress, perf_counter() - start),
        "calibration": result.calibration["mixed"].to_json(),
        "notices": list(result.notices),
    }


def accuracy(found: Mapping[str, float]) -> Row:
    """A score with its 95 % interval."""
    images = int(found["images"])
    return {
        "top1": found["top1"],
        "interval95": interval95(found["top1"], images),
        "images": images,
    }


def _seconds(progress: Progress, whole: float) -> Row:
    stages = {stage: progress.seconds.get(stage, 0.0) for stage in STAGES}
    return {"seconds": whole, "seconds_by_stage": stages}
