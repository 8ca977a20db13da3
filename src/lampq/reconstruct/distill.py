"""Reconstruction of the whole model at once.

The quantized model learns the block outputs of the float one, and its answers, on the calibration
images.

Codes, scales, biases and norms of all blocks are trained together, so that a layer makes up for
what the others lose. The float model answers for every picture that is shown, so pictures may be
cropped, mirrored and mixed at will: a thousand of them give many more, and are not learned by
heart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lampq.data import Samples
from lampq.hooks import recording_outputs
from lampq.reconstruct.align import Align
from lampq.reconstruct.base import Finish, Rates, follow_cosine
from lampq.reconstruct.blocks import fisher_weights, softened
from lampq.reconstruct.heads import Heads
from lampq.reconstruct.precision import Precision, computing
from lampq.reconstruct.trainable import fitted, trainable
from lampq.types import LayerRole
from lampq.views import mixed, shown


@dataclass(frozen=True, slots=True)
class Distill:
    """Training of all blocks by the error of their outputs and by the divergence of the answers.

    The error of a block output is that behind a norm without gains: what the next block sees of it.
    Patch embedding and head are not trained: with one picture of a class the head would learn which
    classes there are pictures of. It is solved by least squares in the end.

    ``answers``: weight of the divergence of the answers beside the error of the block outputs.
    ``focus``: the share of a token's weight that follows the Fisher information at its position;
    the rest is even. ``smallest``: the least share of a picture that a crop keeps; 1 shows whole
    pictures only. ``mirror``: whether half of the pictures are shown mirrored. ``mixed``: the share
    of pictures that are blended with another one, or have a part of it in them. ``start``: what is
    done before, None to train the fits as they are. ``heads``: how the head is solved in the end,
    None to leave it as it is. ``keep``: after how many steps the state is stored for resuming.
    """

    rates: Rates = field(default_factory=lambda: Rates(weights=5e-3, scales=5e-4, affine=3e-4))
    iterations: int = 3500
    batch: int = 16
    smallest: float = 0.2
    mirror: bool = True
    mixed: float = 0.8
    answers: float = 0.15
    focus: float = 0.2
    precision: Precision = "auto"
    start: Align | None = field(default_factory=Align)
    heads: Heads | None = field(default_factory=Heads)
    keep: int = 100

    def __call__(self, job: Finish) -> nn.Module:
        """The model after training."""
        begun = job
        if self.start is not None:
            begun = self.start.aligned(job)
            job.offer(self.start.assembled(begun))
        model = fitted(self.trained(job, trainable(job.model, begun.layers, job.sites)))
        return model if self.heads is None else self.heads(job, model)

    def trained(self, job: Finish, model: nn.Module) -> nn.Module:
        """The trainable model after training."""
        for parameter in model.parameters():
            parameter.requires_grad = False
        optimizer = self.rates.optimizer(nn.ModuleList(_learners(job, model)))
        counts = position_counts(job.model, job.graph.blocks, job.samples, job.seed, self.focus)
        start = self._resumed(job, model, optimizer)
        steps = range(start, self.iterations)
        for step in job.progress.track(steps, "distilling", len(steps)):
            follow_cosine(optimizer, step / self.iterations)
            optimizer.zero_grad(set_to_none=True)
            self._loss(job, model, self._shown(job, step), counts).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if (step + 1) % self.keep == 0 or step + 1 == self.iterations:
                job.store.save("distilled", _state(optimizer, step + 1))
        for parameter in model.parameters():
            parameter.requires_grad = False
        return model

    def _loss(
        self, job: Finish, model: nn.Module, pictures: Tensor, counts: Mapping[str, Tensor]
    ) -> Tensor:
        """Mean error of the block outputs, and divergence of the answers."""
        blocks = list(counts)
        with computing(self.precision):
            with torch.no_grad(), recording_outputs(job.model, blocks) as wanted:
                answers = job.model(pictures)
            with recording_outputs(model, blocks) as found:
                given = model(pictures)
        loss = self.answers * softened(given, answers, 1.0)
        errors = [_seen_error(found[name], wanted[name], counts[name]) for name in blocks]
        return loss + torch.stack(errors).mean() if errors else loss

    def _shown(self, job: Finish, step: int) -> Tensor:
        """Network input of one step; every picture is shown once before any is shown again."""
        size = min(self.batch, len(job.samples))
        number, part = divmod(step, len(job.samples) // size)
        order = torch.randperm(
            len(job.samples), generator=torch.Generator().manual_seed(job.seed + number)
        )
        index = order[part * size : (part + 1) * size]
        generator = torch.Generator().manual_seed((job.seed * 1_000_003 + step) % 2**63)
        views = shown(job.samples.inputs(index), self.smallest, generator, mirror=self.mirror)
        return mixed(views, self.mixed, generator)

    def _resumed(self, job: Finish, model: nn.Module, optimizer: torch.optim.Adam) -> int:
        stored = job.store.load("distilled")
        if stored is None:
            return 0
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for number, parameter in enumerate(parameters):
            parameter.data.copy_(stored[f"{number} value"])
            optimizer.state[parameter] = {
                "step": stored["steps"].float(),
                "exp_avg": stored[f"{number} mean"].clone(),
                "exp_avg_sq": stored[f"{number} square"].clone(),
            }
        return int(stored["steps"])


def _state(optimizer: torch.optim.Adam, steps: int) -> Mapping[str, Tensor]:
    """What is needed to go on after so many steps."""
    state: dict[str, Tensor] = {"steps": torch.tensor(steps)}
    parameters: list[Any] = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in enumerate(parameters):
        state[f"{number} value"] = parameter.detach()
        state[f"{number} mean"] = optimizer.state[parameter]["exp_avg"]
        state[f"{number} square"] = optimizer.state[parameter]["exp_avg_sq"]
    return state


def _learners(job: Finish, model: nn.Module) -> list[nn.Module]:
    """What is trained: the blocks, and the layers between them."""
    between = [x.name for x in job.graph.layers if x.role is LayerRole.REDUCTION]
    return [model.get_submodule(name) for name in (*job.graph.blocks, *between)]


def _seen_error(found: Tensor, wanted: Tensor, counts: Tensor) -> Tensor:
    """Squared error of a block output as the next norm shows it, tokens counted by position.

    As it is, a few enormous tokens and channels would make all of it.
    """
    channels = wanted.shape[-1:]
    difference = F.layer_norm(found.float(), channels) - F.layer_norm(wanted.float(), channels)
    return (difference.square().mean(dim=-1) * counts).mean()


def position_counts(
    model: nn.Module, blocks: Sequence[str], samples: Samples, seed: int, focus: float
) -> dict[str, Tensor]:
    """How much each position of a block output counts, one on average.

    Blocks whose output is not one tensor are left out.
    """
    weights = fisher_weights(model, blocks, samples, seed)
    power = {name: weight.mean(dim=-1) for name, weight in weights.items()}
    return {name: focus * p / p.mean() + 1 - focus for name, p in power.items()}
