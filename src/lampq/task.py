"""What a model is for: how it is run, what it loses, and how good its answers are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lampq.data import AnySamples, Samples
from lampq.evaluate import PrefixCache, Quality, predict, top1
from lampq.graph.discover import discover
from lampq.graph.families import RolePattern
from lampq.models import ModelSource, source_of
from lampq.passes import ClassifierPasses, Passes
from lampq.progress import Progress
from lampq.types import ModelGraph


class Measured(Protocol):
    """How good answers are, by the names of options; higher is better."""

    def signal(self, name: str) -> float:
        """The part that an option calls by that name."""
        ...

    def values(self) -> list[Any]:
        """What ``Task.measured`` takes, ready for a journal."""
        ...

    def to_json(self) -> dict[str, Any]:
        """The parts by name, ready for a report."""
        ...


class Prefix(Protocol):
    """A reference model on some samples, for models that differ from some block on."""

    @property
    def answers(self) -> Any:
        """What the reference answers."""
        ...

    def started(self, model: nn.Module, first: int) -> Iterator[tuple[Any, Any]]:
        """The batches; a model that differs from block ``first`` on may start there meanwhile."""
        ...

    def predict(self, model: nn.Module, first: int) -> Any:
        """The answers of a model that differs in blocks ``first`` and later only."""
        ...


class Task(Passes, Protocol):
    """All that differs between a classifier and a detector, for every stage of a run."""

    @property
    def name(self) -> str:
        """What the options call it."""
        ...

    @property
    def max_tokens(self) -> int:
        """How many tokens are kept of what a layer sees."""
        ...

    def graph(self, model: nn.Module, patterns: tuple[RolePattern, ...]) -> ModelGraph:
        """The sites of a model in its explicit form."""
        ...

    def source(self, model: nn.Module) -> ModelSource:
        """How the architecture of a model is built again."""
        ...

    def outputs(self, model: nn.Module, images: Any) -> Tensor:
        """Numbers that change whenever the function of the model does."""
        ...

    def predict(self, model: nn.Module, samples: Any, progress: Progress | None = None) -> Any:
        """The answers of a model."""
        ...

    def prefix(
        self, reference: nn.Module, blocks: Sequence[str], samples: Any, batch: int | None = None
    ) -> Prefix:
        """What the blocks of the reference are given on the samples."""
        ...

    def quality(self, answers: Any, reference: Any, samples: Any) -> Measured:
        """How good answers are, beside those of the float model."""
        ...

    def measured(self, values: Sequence[Any]) -> Measured:
        """The quality of its values."""
        ...

    def score(self, model: Any, samples: Any, progress: Progress, label: str) -> dict[str, Any]:
        """What a report says of a model on evaluation images."""
        ...

    def pictures(
        self, models: Mapping[str, nn.Module], samples: Any, progress: Progress
    ) -> bytes | None:
        """What models answer to the first evaluation images, to look at, as JPEG; or nothing."""
        ...


class Classification(ClassifierPasses):
    """Images of one size in, logits out."""

    name = "classification"
    max_tokens = 8192

    def graph(self, model: nn.Module, patterns: tuple[RolePattern, ...]) -> ModelGraph:
        """What the patterns find."""
        return discover(model, patterns)

    def source(self, model: nn.Module) -> ModelSource:
        """Remembered, found through timm, or the user's own class."""
        return source_of(model)

    @torch.no_grad()
    def outputs(self, model: nn.Module, images: Tensor) -> Tensor:
        """The logits."""
        logits: Tensor = model(images)
        return logits

    def predict(
        self, model: nn.Module, samples: Samples, progress: Progress | None = None
    ) -> Tensor:
        """Logits of all samples."""
        return predict(model, samples, progress=progress)

    def prefix(
        self, reference: nn.Module, blocks: Sequence[str], samples: Any, batch: int | None = None
    ) -> PrefixCache:
        """The inputs of the blocks."""
        options = {} if batch is None else {"batch": batch}
        return PrefixCache(reference, blocks, samples, **options)

    def quality(self, answers: Tensor, reference: Tensor, samples: Samples) -> Quality:
        """Accuracy, likelihood and agreement."""
        return Quality.of(answers, reference, samples.labels)

    def measured(self, values: Sequence[Any]) -> Quality:
        """The quality of its values."""
        return Quality(*values)

    def score(
        self,
        model: Callable[[Tensor], Tensor],
        samples: Samples,
        progress: Progress,
        label: str,
    ) -> dict[str, Any]:
        """Accuracy in percent, and the number of images."""
        labels = samples.require_labels("an accuracy")
        logits = predict(model, samples, progress=progress, label=label)
        return {"top1": top1(logits, labels), "images": len(samples)}

    def pictures(
        self, _models: Mapping[str, nn.Module], _samples: Any, _progress: Progress
    ) -> bytes | None:
        """Nothing: the answers of a classifier are no pictures."""
        return None


CLASSIFICATION = Classification()

__all__ = ["CLASSIFICATION", "AnySamples", "Classification", "Measured", "Prefix", "Task"]
