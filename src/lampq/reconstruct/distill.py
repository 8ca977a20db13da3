"""Reconstruction of the whole model at once.

The quantized model learns the answers of the float one on the calibration images.

Codes, scales, biases and norms of all layers are trained together, so that a layer makes up for
what the others lose. The float model answers for every picture that is shown, so pictures may be
cropped and mirrored at will: a thousand of them give many more. Its answers to one round of views
are computed at once and kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lampq.reconstruct.base import Finish, Rates, follow_cosine
from lampq.reconstruct.blocks import softened
from lampq.reconstruct.trainable import fitted, trainable


@dataclass(frozen=True, slots=True)
class Distill:
    """Training of all layers by the divergence from the float model.

    ``smallest``: the least share of a picture that a crop keeps; 1 shows whole pictures only.
    ``mirror``: whether half of the pictures are shown mirrored. ``views``: different views of a
    picture, shown in turn. ``keep``: after how many steps the state is stored for resuming.
    """

    rates: Rates = field(default_factory=lambda: Rates(weights=3e-3, scales=1e-3, affine=2e-4))
    iterations: int = 1000
    batch: int = 16
    smallest: float = 0.35
    mirror: bool = True
    views: int = 8
    keep: int = 100

    def __call__(self, job: Finish) -> nn.Module:
        """The model after training."""
        return fitted(self.trained(job, trainable(job.model, job.layers, job.matmuls)))

    def trained(self, job: Finish, model: nn.Module) -> nn.Module:
        """The trainable model after training."""
        optimizer = self.rates.optimizer(model)
        start = self._resumed(job, model, optimizer)
        steps = range(start, self.iterations)
        size = min(self.batch, len(job.samples))
        per_round = len(job.samples) // size
        answers: dict[int, Tensor] = {}
        for step in job.progress.track(steps, "distilling", len(steps)):
            number, part = divmod(step, per_round)
            view = number % self.views
            if view not in answers:
                answers[view] = self._answers(job, view)
            # every picture once before any is shown again
            order = torch.randperm(
                len(job.samples), generator=torch.Generator().manual_seed(job.seed + number)
            )
            index = order[part * size : (part + 1) * size]
            follow_cosine(optimizer, step / self.iterations)
            optimizer.zero_grad(set_to_none=True)
            logits = model(self._shown(job, index, view))
            softened(logits, answers[view][index], 1.0).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if (step + 1) % self.keep == 0 or step + 1 == self.iterations:
                job.store.save("distilled", _state(optimizer, step + 1))
        for parameter in model.parameters():
            parameter.requires_grad = False
        return model

    def _shown(self, job: Finish, index: Tensor, view: int) -> Tensor:
        """Network input of one view of some pictures; the same whenever it is shown."""
        first = (job.seed * self.views + view) * len(job.samples)
        seeds = [(first + i) % 2**63 for i in index.tolist()]
        return shown(job.samples.inputs(index), seeds, self.smallest, mirror=self.mirror)

    @torch.no_grad()
    def _answers(self, job: Finish, view: int) -> Tensor:
        """Logits of the float model for one view of all pictures."""
        parts = torch.split(torch.arange(len(job.samples)), self.batch)
        return torch.cat([job.model(self._shown(job, index, view)) for index in parts])

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


def shown(images: Tensor, seeds: Sequence[int], smallest: float, *, mirror: bool) -> Tensor:
    """Each image cropped to a random part, and mirrored or not, by its seed."""
    views = []
    for image, seed in zip(images, seeds, strict=True):
        generator = torch.Generator().manual_seed(seed)
        view = _cropped(image, smallest, generator) if smallest < 1 else image
        turned = mirror and float(torch.rand((), generator=generator)) < 0.5
        views.append(view.flip(-1) if turned else view)
    return torch.stack(views)


def _cropped(image: Tensor, smallest: float, generator: torch.Generator) -> Tensor:
    """A random part of the picture, nearly of its proportions, at its size."""
    height, width = image.shape[-2:]
    share = math.sqrt(float(torch.empty(()).uniform_(smallest, 1.0, generator=generator)))
    stretch = math.sqrt(float(torch.empty(()).uniform_(0.8, 1.25, generator=generator)))
    rows = max(1, min(height, round(height * share * stretch)))
    columns = max(1, min(width, round(width * share / stretch)))
    top = int(torch.randint(height - rows + 1, (), generator=generator))
    left = int(torch.randint(width - columns + 1, (), generator=generator))
    part = image[None, :, top : top + rows, left : left + columns]
    return F.interpolate(part, size=(height, width), mode="bilinear", align_corners=False)[0]
