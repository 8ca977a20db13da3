"""Scores of a model on samples, and scoring from the middle of a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lampq.data import Samples
from lampq.hooks import recording
from lampq.progress import Progress
from lampq.quant.modules import replace_module

BATCH = 25


@torch.no_grad()
def predict(
    model: Callable[[Tensor], Tensor],
    samples: Samples,
    batch: int = BATCH,
    progress: Progress | None = None,
    label: str = "answers",
) -> Tensor:
    """Logits of all samples, (samples, classes)."""
    batches = (progress or Progress()).track(
        samples.batches(batch), label, -(-len(samples) // batch)
    )
    return torch.cat([model(images) for images, _ in batches])


def top1(logits: Tensor, labels: Tensor) -> float:
    """Percentage of samples whose largest logit is that of their label."""
    return 100.0 * float((logits.argmax(dim=1) == labels).double().mean())


def cross_entropy(logits: Tensor, labels: Tensor) -> float:
    """Mean negative log-likelihood of the labels."""
    return float(F.cross_entropy(logits.double(), labels))


def divergence(logits: Tensor, reference: Tensor) -> float:
    """Mean KL divergence of the model's distribution from the reference's."""
    log_p, log_q = reference.double().log_softmax(1), logits.double().log_softmax(1)
    return float(F.kl_div(log_q, log_p, reduction="batchmean", log_target=True))


def interval95(top1_percent: float, images: int) -> float:
    """Half width of the 95 % interval of an accuracy, in points: Wilson's, also right near 0."""
    p, z = top1_percent / 100, 1.96
    return 100 * z * math.sqrt(images * p * (1 - p) + z * z / 4) / (images + z * z)


@dataclass(frozen=True, slots=True)
class Quality:
    """How good logits are, higher is better in every part.

    ``agreement`` is minus the KL divergence from the float model.
    """

    accuracy: float
    likelihood: float
    agreement: float

    @classmethod
    def of(cls, logits: Tensor, reference: Tensor, labels: Tensor | None) -> Quality:
        """All three measures; without labels the float model's own answers stand in for them."""
        answers = reference.argmax(dim=1) if labels is None else labels
        return cls(
            top1(logits, answers),
            -cross_entropy(logits, answers),
            -divergence(logits, reference),
        )

    def signal(self, name: str) -> float:
        """The part that an option calls by that name."""
        parts = {"accuracy": self.accuracy, "loss": self.likelihood, "kl": self.agreement}
        return parts[name]

    def values(self) -> list[float]:
        """The parts in order."""
        return [self.accuracy, self.likelihood, self.agreement]

    def to_json(self) -> dict[str, float]:
        """The parts by name."""
        return asdict(self)


class _PassThrough(nn.Module):
    """Stands in for a block whose output is not needed."""

    def forward(self, x: Tensor, *_rest: Any, **_named: Any) -> Tensor:
        return x


class _Inject(nn.Module):
    """A block that is given a stored input instead of the one it receives."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.stored: Tensor | None = None

    def forward(self, _x: Tensor, *rest: Any, **named: Any) -> Tensor:
        output: Tensor = self.block(self.stored, *rest, **named)
        return output


@contextmanager
def _starting_at(model: nn.Module, blocks: Sequence[str], first: int | None) -> Iterator[_Inject]:
    """The model with the blocks before ``first`` left out, restored at the end."""
    if first is None:
        yield _Inject(model)
        return
    originals = {name: model.get_submodule(name) for name in blocks[: first + 1]}
    inject = _Inject(originals[blocks[first]])
    try:
        for name in blocks[:first]:
            replace_module(model, name, _PassThrough())
        replace_module(model, blocks[first], inject)
        yield inject
    finally:
        for name, module in originals.items():
            replace_module(model, name, module)


class PrefixCache:
    """Inputs of every block of a reference model on some samples.

    A model that equals the reference up to block k is run from block k on. Where the blocks do not
    follow one another (parallel branches), whole models are run instead. At most ``limit`` bytes
    are kept; where that is not enough for every block, every second, third, ... one is kept.
    """

    @torch.no_grad()
    def __init__(
        self,
        reference: nn.Module,
        blocks: Sequence[str],
        samples: Samples,
        *,
        batch: int = BATCH,
        limit: int = 1_500_000_000,
    ) -> None:
        self.blocks, self.samples, self.batch = tuple(blocks), samples, batch
        # one array per block: pieces of the passes themselves would leave the heap in fragments
        self._inputs: dict[int, Tensor] = {}
        logits: list[Tensor] = []
        with recording(reference, list(blocks)) as seen:
            for number, (images, _) in enumerate(samples.batches(batch)):
                seen.clear()
                logits.append(reference(images))
                inputs = [seen[name][0] for name in blocks]
                if number == 0:
                    per_image = [x.numel() * x.element_size() / len(images) for x in inputs]
                    stride = math.ceil(sum(per_image) * len(samples) / limit)
                    for i in range(0, len(blocks), max(1, stride)):
                        rows = len(inputs[i]) // len(images) * len(samples)
                        self._inputs[i] = inputs[i].new_empty(rows, *inputs[i].shape[1:])
                for i, stored in self._inputs.items():
                    stored[self._rows(i, number)] = inputs[i]
        self.logits = torch.cat(logits)
        if not self._is_chain(reference):
            self._inputs.clear()

    def _rows(self, block: int, number: int) -> slice:
        """Where the input of a block for one batch of images is stored."""
        size = len(self._inputs[block]) // len(self.samples) * self.batch
        return slice(number * size, (number + 1) * size)

    def _is_chain(self, reference: nn.Module) -> bool:
        """Whether running one image from every stored block gives the whole model's answer."""
        image = self.samples.inputs(slice(0, 1))
        for start, stored in self._inputs.items():
            with _starting_at(reference, self.blocks, start) as inject:
                inject.stored = stored[: len(stored) // len(self.samples)]
                try:
                    logits = reference(image)
                except RuntimeError:
                    return False
            if not torch.allclose(logits, self.logits[:1], rtol=1e-3, atol=1e-3):
                return False
        return True

    def started(self, model: nn.Module, first: int) -> Iterator[tuple[Tensor, Tensor | None]]:
        """The batches; a model that differs from block ``first`` on starts there meanwhile."""
        start = max((i for i in self._inputs if i <= first), default=None)
        with _starting_at(model, self.blocks, start) as inject:
            for number, batch in enumerate(self.samples.batches(self.batch)):
                if start is not None:
                    inject.stored = self._inputs[start][self._rows(start, number)]
                yield batch

    @property
    def answers(self) -> Tensor:
        """The logits of the reference."""
        return self.logits

    @torch.no_grad()
    def predict(self, model: nn.Module, first: int) -> Tensor:
        """Logits of a model that differs from the reference in blocks ``first`` and later only."""
        return torch.cat([model(images) for images, _ in self.started(model, first)])
