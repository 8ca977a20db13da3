"""Detection as a task: how a detector is run, what it loses, and how good its answers are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lampq.detection.ap import Detection, average_precision, detect
from lampq.detection.models import Detector, detection_losses
from lampq.detection.pictures import side_by_side
from lampq.detection.samples import DetectionSamples, Target
from lampq.detection.sites import detector_graph
from lampq.detection.source import DetectorSource
from lampq.errors import ConfigError
from lampq.graph.families import RolePattern
from lampq.models import ModelSource
from lampq.passes import Labels
from lampq.progress import Progress
from lampq.types import ModelGraph

PICTURED = 4  # pictures of detections beside a report
SMALL = 256  # pixels of an edge up to which they are shown at twice their size


@dataclass(frozen=True, slots=True)
class DetectionQuality:
    """How good the answers of a detector are, higher is better; None where it was not measured.

    Attributes:
        ap: Mean of box and mask AP, in percent.
        likelihood: Minus the sum of its training losses, a mean over images.
    """

    ap: float | None
    likelihood: float | None

    def signal(self, name: str) -> float:
        """The part that an option calls by that name."""
        value = {"ap": self.ap, "loss": self.likelihood}[name]
        assert value is not None, "the task measures what the options ask for"
        return value

    def values(self) -> list[float | None]:
        """The parts in order."""
        return [self.ap, self.likelihood]

    def to_json(self) -> dict[str, float | None]:
        """The parts by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Answers:
    """What a detector finds, and what it loses, as far as it is measured."""

    found: Sequence[Detection] | None
    loss: float | None


@dataclass(frozen=True, slots=True)
class DetectionTask:
    """Pictures of any size in, one at a time; boxes and masks out.

    Attributes:
        signals: What is measured of answers: ap, loss or both.
        heads: Whether what is behind the backbone is quantized too.
    """

    name: ClassVar[str] = "detection"
    # rows of thousands of channels: half of what classifiers keep
    max_tokens: ClassVar[int] = 4096
    signals: tuple[str, ...] = ("ap", "loss")
    heads: bool = True

    def at_once(self, _wanted: int) -> int:
        """One picture: the next has another size."""
        return 1

    def forward(self, model: nn.Module, images: list[Tensor], known: list[Target]) -> None:
        """The pass of the losses, in which the heads see every object of the pictures."""
        detection_losses(model, images, known)

    def loss(
        self,
        model: nn.Module,
        images: list[Tensor],
        known: list[Target],
        _labels: Labels,
        _generator: torch.Generator,
    ) -> Tensor:
        """The sum of the training losses; its draws are the same every time."""
        return torch.stack(list(detection_losses(model, images, known).values())).sum()

    def graph(self, model: nn.Module, _patterns: tuple[RolePattern, ...]) -> ModelGraph:
        """The layers of the backbone, and those behind it."""
        return detector_graph(model, heads=self.heads)

    def source(self, model: nn.Module) -> ModelSource:
        """The options of the detector."""
        if not isinstance(model, Detector):
            raise ConfigError(
                f"detection is for models of lampq.detection.detector(), not a "
                f"{type(model).__name__}"
            )
        return DetectorSource.of(model.options)

    @torch.no_grad()
    def outputs(self, model: nn.Module, images: list[Tensor]) -> Tensor:
        """The levels of the pyramid, one after another."""
        assert isinstance(model, Detector), "checked when the run was prepared"
        levels = [
            level.flatten()
            for image in images
            for level in model.backbone(model.transform([image])[0].tensors).values()
        ]
        return torch.cat(levels)

    @torch.no_grad()
    def predict(
        self, model: nn.Module, samples: DetectionSamples, progress: Progress | None = None
    ) -> Answers:
        """What the model finds and loses, as far as it is asked for."""
        progress = progress or Progress()
        found = None
        if "ap" in self.signals:
            found = detect(model, samples, batch=1, progress=progress)
        loss = None
        if "loss" in self.signals:
            generator = torch.Generator()
            losses = [
                float(self.loss(model, images, known, "data", generator))
                for images, known in progress.track(samples.batches(1), "losses", len(samples))
            ]
            loss = sum(losses) / len(losses)
        return Answers(found, loss)

    def prefix(
        self,
        reference: nn.Module,
        blocks: Sequence[str],
        samples: DetectionSamples,
        batch: int | None = None,
    ) -> WholeRuns:
        """Whole runs: the pyramid takes what every stage gives."""
        del blocks, batch
        return WholeRuns(self, reference, samples)

    def quality(
        self, answers: Answers, _reference: Answers, samples: DetectionSamples
    ) -> DetectionQuality:
        """AP and loss."""
        ap = None
        if answers.found is not None:
            scores = average_precision(samples, answers.found)
            ap = 50 * ((scores.box.ap or 0.0) + (scores.mask.ap or 0.0))
        return DetectionQuality(ap, None if answers.loss is None else -answers.loss)

    def measured(self, values: Sequence[Any]) -> DetectionQuality:
        """The quality of its values."""
        return DetectionQuality(*values)

    def score(
        self, model: nn.Module, samples: DetectionSamples, progress: Progress, label: str
    ) -> dict[str, Any]:
        """Box and mask AP, by size and by class, from 0 to 1, and the number of images."""
        pictures = progress.track(range(len(samples)), label, len(samples))
        with torch.no_grad():
            found = [
                Detection.of(output)
                for i in pictures
                for output in model(samples.inputs(slice(i, i + 1)))
            ]
        return average_precision(samples, found).to_json()

    def pictures(
        self, models: Mapping[str, nn.Module], samples: DetectionSamples, progress: Progress
    ) -> bytes | None:
        """What the models find in the first pictures, side by side."""
        few = samples.pick(range(min(PICTURED, len(samples))))
        columns = {
            name: detect(model, few, batch=1, progress=progress) for name, model in models.items()
        }
        zoom = 2 if max(max(size) for size in few.sizes) <= SMALL else 1
        content = BytesIO()
        side_by_side(few, columns, zoom=zoom).save(content, format="JPEG", quality=88)
        return content.getvalue()


class WholeRuns:
    """A reference detector on some samples; models that differ from it are run whole."""

    def __init__(
        self, task: DetectionTask, reference: nn.Module, samples: DetectionSamples
    ) -> None:
        self.task, self.samples, self._reference = task, samples, reference
        self._answers: Answers | None = None

    @property
    def answers(self) -> Answers:
        """What the reference answers."""
        if self._answers is None:
            self._answers = self.task.predict(self._reference, self.samples)
        return self._answers

    def started(self, _model: nn.Module, _first: int) -> Iterator[tuple[Any, Any]]:
        """The batches."""
        yield from self.samples.batches(1)

    def predict(self, model: nn.Module, _first: int) -> Answers:
        """The answers of a model."""
        return self.task.predict(model, self.samples)
