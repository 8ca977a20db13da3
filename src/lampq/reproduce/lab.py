"""What the tables and figures share: one model, its images, and all that was computed of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import nn

from lampq.artifact.states import StateFolder
from lampq.compare import Trial, accuracy, by_sharing, check, make_trials, quantized
from lampq.config import TASKS, RunConfig
from lampq.data import AnySamples, Preprocessing, Samples
from lampq.errors import ConfigError, LampqError
from lampq.methods import FitCache
from lampq.models import FloatModel
from lampq.pipeline import fit_cache, packed
from lampq.progress import Journal, Progress
from lampq.runfolder import score
from lampq.sharing import Shared

Row = dict[str, Any]


def top1_row(model: nn.Module, samples: Samples, progress: Progress, label: str) -> Row:
    """Accuracy of a classifier with its 95 % interval."""
    return accuracy(score(model, samples, progress, label))


def said_of(row: Row) -> str:
    """What became of a trial, in a few words."""
    if "error" in row:
        return str(row["error"])
    if "box_ap" in row:
        return f"box AP {row['box_ap']:.1f}, mask AP {row['mask_ap']:.1f}"
    return f"{row['top1']:.2f} %" if "top1" in row else "done"


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked for, beside model and images.

    Attributes:
        options: Fields of RunConfig that all trials have.
        bits: Widths of the table or figure; its own if empty.
        rows: Methods of the table; all if empty.
        eval_images: How many evaluation images are used; all if None.
        synthesis_steps: Steps of a batch of zero-shot pictures; the recipe's if None.
    """

    options: Mapping[str, Any]
    bits: tuple[float, ...] = ()
    rows: tuple[str, ...] = ()
    eval_images: int | None = None
    synthesis_steps: int | None = None

    def to_json(self) -> Row:
        """What tells two requests from each other."""
        names = ("bits", "rows", "eval_images", "synthesis_steps")
        found = {"options": dict(self.options), **{name: getattr(self, name) for name in names}}
        plain: Row = json.loads(json.dumps(found))
        return plain


@dataclass(frozen=True, slots=True)
class Lab:
    """One model with its images, and what is known of it already.

    Attributes:
        loaded: The float model.
        weights: Its weights file, if one was given.
        how: How pictures are prepared; a detector takes them as they are.
        calibration: Gives the calibration images of a seed.
        evaluation: The images that scores are measured on, or None.
        asked: Options and widths.
        work: The folder of finished pieces.
        shared: Fits and measurements of the trials so far.
        journal: Finished trials and accuracies.
        progress: Makes what is told of each piece of work.
        score: The measures of a model on evaluation images, by name.
    """

    loaded: FloatModel
    weights: Path | None
    how: Preprocessing | None
    calibration: Callable[[int], Any]
    evaluation: AnySamples | None
    asked: Asked
    work: Path
    shared: Shared
    journal: Journal
    progress: Callable[[], Progress]
    score: Callable[[nn.Module, Any, Progress, str], Row] = top1_row

    @classmethod
    def open(cls, work: Path, **fields: Any) -> Lab:
        """A lab with what an earlier one left in that folder."""
        journal = Journal(work / "journal.jsonl")
        return cls(**fields, work=work, shared=Shared(work / "shared"), journal=journal)

    def on(self, name: str, samples: Samples) -> Lab:
        """The same lab with other calibration images, whose fits are kept apart."""
        work = self.work / name
        work.mkdir(parents=True, exist_ok=True)
        return replace(
            self,
            calibration=lambda seed: samples,
            work=work,
            shared=Shared(work / "shared"),
            journal=Journal(work / "journal.jsonl"),
        )

    @property
    def scored(self) -> Any:
        """The evaluation images: Samples, or DetectionSamples."""
        if self.evaluation is None:
            raise ConfigError("accuracies need evaluation pictures: give --eval DIR")
        return self.evaluation

    def bits(self, *own: float) -> tuple[float, ...]:
        """The widths that were asked for, or those of the paper."""
        return self.asked.bits or own

    def trial(self, plan: str, bits: float, changes: Mapping[str, Any] | None = None) -> Trial:
        """A way to find the widths at a budget; ``changes`` are options of this trial alone."""
        options = {**self.asked.options, **(changes or {})}
        (trial,) = make_trials(options, plans=(plan,), bits=(bits,), tasks=TASKS)
        return trial

    def run(self, trials: Mapping[str, Trial]) -> dict[str, Row]:
        """The row of every trial by its name, each computed once; a failed one has its error.

        A row has the scores, if there are evaluation images, and the widths of all layers, the
        details of the metric, and the accuracy on calibration images (of a detector, what accepts
        plans).
        """
        check(self.loaded, tuple(trials.values()))
        names = {id(trial): name for name, trial in trials.items()}
        rows: dict[str, Row] = {}
        for trial in by_sharing(tuple(trials.values())):
            name = names[id(trial)]
            try:
                rows[name] = self.journal.once(
                    self._key(trial.config), partial(self._row, name, trial.config)
                )
            except LampqError as error:
                rows[name] = {"error": str(error)}
            self.progress().note(f"  {name}: {said_of(rows[name])}")
        errors = [row["error"] for row in rows.values() if "error" in row]
        if errors and len(errors) == len(rows):
            raise ConfigError(f"every trial failed, the first because {errors[0]}")
        return {name: rows[name] for name in trials}

    def _key(self, config: RunConfig) -> str:
        images = 0 if self.evaluation is None else len(self.evaluation)
        text = json.dumps(config.to_json(), sort_keys=True)
        return f"trial {images} {hashlib.sha256(text.encode()).hexdigest()[:24]}"

    def _row(self, name: str, config: RunConfig) -> Row:
        start, progress = perf_counter(), self.progress()
        states = StateFolder(self.work / "states" / self._key(config))
        beside = replace(self.shared.run(config, progress), states=states)
        result = quantized(self.loaded, self.calibration(config.seed), config, beside)
        found: Row = {}
        if self.evaluation is not None:
            found = self.score(result.model, self.evaluation, progress, f"scoring {name}")
        return {
            **found,
            "plan": {layer: [b.weight, b.activation] for layer, b in result.plan.items()},
            "mean_weight_bits": result.plan.mean_weight_bits,
            "mean_activation_bits": result.plan.mean_activation_bits,
            "file_bytes": len(
                packed(result.model, self.loaded.source, result.plan, config, self.how)
            ),
            "details": {} if result.sensitivity is None else dict(result.sensitivity.details),
            "calibration": result.calibration["mixed"].signal(
                "accuracy" if config.task == "classification" else config.accept
            ),
            "exchanges": [sum(step.accepted for step in result.steps), len(result.steps)],
            "notices": list(result.notices),
            "seconds": perf_counter() - start,
        }

    def fits(self, config: RunConfig) -> FitCache:
        """The fits of these options."""
        beside = self.shared.run(config, self.progress())
        return fit_cache(self.loaded.model, self.calibration(config.seed), config, beside)

    def float_row(self) -> Row:
        """The score of the float model."""

        def measure() -> Row:
            found = self.score(self.loaded.model, self.scored, self.progress(), "scoring fp32")
            size = 4 * sum(p.numel() for p in self.loaded.model.parameters())
            return {**found, "mean_weight_bits": 32.0, "file_bytes": size}

        return self.journal.once(f"float {len(self.scored)}", measure)
