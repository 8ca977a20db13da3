"""Many trials on one model and one pair of image sets, and one table of them.

A trial is a method, a way to find the widths, a budget, a seed, and a reconstruction or none.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from lampq.artifact.checkpoint import write_atomically
from lampq.artifact.fits import FitFolder
from lampq.artifact.states import StateFolder
from lampq.config import RunConfig, make_config
from lampq.data import Preprocessing, Samples
from lampq.errors import ConfigError, LampqError
from lampq.evaluate import interval95
from lampq.limits import budget_of
from lampq.methods import METHODS, FitCache
from lampq.models import LoadedModel
from lampq.pipeline import (
    behind_quantized,
    options_of,
    packed,
    prepare,
    quantize,
    site_widths,
)
from lampq.progress import Journal, Progress, append_line, read_lines
from lampq.report import STAGES
from lampq.report.table import Row, table_csv, table_json, table_markdown
from lampq.runfolder import check_labels, fingerprint_of, open_work, score
from lampq.scoring import Run

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
) -> tuple[Trial, ...]:
    """Every combination, in the order of the table; an empty list takes the common option.

    ``options`` are fields of RunConfig, common to all.
    """
    common = make_config(options)
    if common.task != "classification":
        raise ConfigError(f"a comparison is one of classifiers, not of {common.task}")
    for name in ("target_size", "target_bops"):
        if getattr(common, name) is not None:
            raise ConfigError(f"a comparison has its budgets from bits: leave {name} out")
    for plan in plans:
        if plan not in PLANS:
            raise ConfigError(f"unknown plan {plan!r}; known: {', '.join(PLANS)}")
    found = [
        Trial(method, plan, float(width), seed, finisher, _config(common, plan, settings))
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


def _config(common: RunConfig, plan: str, settings: dict[str, Any]) -> RunConfig:
    config = replace(common, **settings, **PLANS[plan])
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


def shared_options(config: RunConfig) -> dict[str, Any]:
    """All that fits depend on: trials that agree on it share fits, statistics and measurements."""
    factory = METHODS.get(config.method)
    common = (
        *("method", "seed", "images", "profile", "rotation"),
        *("fit_images", "fit_tokens", "fit_inputs"),
    )
    found = {
        **{name: getattr(config, name) for name in common},
        "options": options_of(factory, config),
    }
    if behind_quantized(factory, config):
        found["behind"] = [str(config.target), str(site_widths(config))]
    return found


def sharing_key(config: RunConfig) -> str:
    """A name for that, the same if and only if it is the same."""
    text = json.dumps(shared_options(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


class _Shared:
    """Fits and measurements of trials: all on disk, those of the last sharing key in memory."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self._key = ""
        self._journal = Journal()
        self._fits: FitCache | None = None

    def run(self, trial: Trial, progress: Progress, states: Path) -> Run:
        """What goes on beside a trial, with what the trials before it left."""
        key = sharing_key(trial.config)
        folder = self.work / "shared" / key
        if key != self._key:
            folder.mkdir(parents=True, exist_ok=True)
            self._key, self._fits = key, None
            self._journal = Journal(folder / "journal.jsonl")
        return Run(
            progress,
            self._journal,
            FitFolder(folder / "fits"),
            states=StateFolder(states),
            fits=self._kept,
        )

    def _kept(self, make: Callable[[], FitCache]) -> FitCache:
        if self._fits is None:
            self._fits = make()
        return self._fits


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


def check(loaded: LoadedModel, trials: Sequence[Trial]) -> None:
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
    shared = _Shared(work)

    def finish(row: Row) -> None:
        append_line(out / RESULTS, row)
        rows.append(row)
        _write(comparison, rows, out)
        on_row(row, len(rows), len(trials) + 1)

    if not rows:
        finish(_float_row(comparison, progress()))
    finished = [{name: row[name] for name in trials[0].key} for row in rows]
    for trial in _by_sharing(trials):
        if trial.key in finished:
            continue
        states = work / "states" / hashlib.sha256(json.dumps(trial.key).encode()).hexdigest()[:24]
        finish(_trial_row(comparison, trial, shared, states, progress()))
        shutil.rmtree(states, ignore_errors=True)
    table = _write(comparison, rows, out)
    shutil.rmtree(work, ignore_errors=True)
    return table


def _by_sharing(trials: Sequence[Trial]) -> list[Trial]:
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
        **_accuracy(found),
        "mean_weight_bits": 32.0,
        "mean_activation_bits": 32.0,
        "file_bytes": size,
        "smaller": 1.0,
        **_seconds(progress, perf_counter() - start),
        "calibration": None,
        "notices": [],
    }


def _trial_row(
    comparison: Comparison, trial: Trial, shared: _Shared, states: Path, progress: Progress
) -> Row:
    """The row of one trial; one with the sentence of the error if it fails."""
    start = perf_counter()
    loaded, config = comparison.loaded, trial.config
    try:
        samples = comparison.calibration(trial.seed)
        check_labels(samples, loaded.model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # they come back as notices
            beside = shared.run(trial, progress, states)
            result = quantize(loaded.model, samples, config=config, run=beside)
        name = f"scoring {trial.method} {trial.plan}"
        with progress.stage("evaluate"):
            found = score(result.model, comparison.evaluation, progress, name)
    except LampqError as error:
        return {**trial.key, "error": str(error), "seconds": perf_counter() - start}
    size = len(packed(result.model, loaded.source, result.plan, config, comparison.how))
    return {
        **trial.key,
        **_accuracy(found),
        "mean_weight_bits": result.plan.mean_weight_bits,
        "mean_activation_bits": result.plan.mean_activation_bits,
        "file_bytes": size,
        "smaller": comparison.float_bytes / size,
        **_seconds(progress, perf_counter() - start),
        "calibration": result.calibration["mixed"].to_json(),
        "notices": list(result.notices),
    }


def _accuracy(found: Mapping[str, float]) -> Row:
    images = int(found["images"])
    return {
        "top1": found["top1"],
        "interval95": interval95(found["top1"], images),
        "images": images,
    }


def _seconds(progress: Progress, whole: float) -> Row:
    stages = {stage: progress.seconds.get(stage, 0.0) for stage in STAGES}
    return {"seconds": whole, "seconds_by_stage": stages}
