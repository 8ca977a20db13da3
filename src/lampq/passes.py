"""How a model is run on a batch of images, forward and backward."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lampq.errors import DataError

Labels = Literal["model", "data"]


def drawn_labels(logits: Tensor, generator: torch.Generator) -> Tensor:
    """One label per image, drawn from the model's own distribution."""
    probabilities = logits.detach().double().softmax(dim=1).cpu()
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(1).to(logits.device)


class Passes(Protocol):
    """How a model is run on a batch of images; ``known`` are their labels or targets."""

    def at_once(self, wanted: int) -> int:
        """How many images are run at once where a stage would like so many."""
        ...

    def forward(self, model: nn.Module, images: Any, known: Any) -> None:
        """A pass that calls every site."""
        ...

    def loss(
        self, model: nn.Module, images: Any, known: Any, labels: Labels, generator: torch.Generator
    ) -> Tensor:
        """The loss, summed over the images, so that their gradients do not mix."""
        ...


class ClassifierPasses:
    """Images in, logits out; the loss is the cross entropy of labels, known or drawn."""

    def at_once(self, wanted: int) -> int:
        """As many as a stage likes: all have one size."""
        return wanted

    def forward(self, model: nn.Module, images: Tensor, _known: Tensor | None) -> None:
        """One plain pass."""
        model(images)

    def loss(
        self,
        model: nn.Module,
        images: Tensor,
        known: Tensor | None,
        labels: Labels,
        generator: torch.Generator,
    ) -> Tensor:
        """The cross entropy of the known labels, or of labels drawn from the model."""
        if labels == "data" and known is None:
            raise DataError("a loss with labels='data' needs labels, and the samples have none")
        logits = model(images)
        answer = drawn_labels(logits, generator) if labels == "model" else known
        return F.cross_entropy(logits, answer, reduction="sum")  # type: ignore[arg-type]


CLASSIFIER = ClassifierPasses()


def tracked(images: Any) -> Any:
    """Copies of the images that gradients are traced back to: no weight is."""
    if isinstance(images, Tensor):
        return images.clone().requires_grad_()
    return [image.clone().requires_grad_() for image in images]


def backward(
    model: nn.Module,
    images: Any,
    generator: torch.Generator,
    known: Any = None,
    *,
    labels: Labels = "model",
    passes: Passes = CLASSIFIER,
) -> None:
    """Back-propagate the loss of the images."""
    with torch.enable_grad():
        loss = passes.loss(model, tracked(images), known, labels, generator)
        loss.backward()  # type: ignore[no-untyped-call]
