"""Reconstruction of the whole model at once.

The quantized model learns the answers of the float one on the calibration images.

Codes, scales, biases and norms of all layers are trained together, so that a layer makes up for
what the others lose. The float model answers for every picture that is shown, so pictures may be
cropped and mirrored at will: a thousand of them give many more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lampq.data import Samples
from lampq.reconstruct.base import Finish, Rates, follow_cosine
from lampq.reconstruct.blocks import softened
from lampq.reconstruct.trainable import fitted, trainable


@dataclass(frozen=True, slots=True)
class Distill:
    """Training of all layers by the divergence from the float model.

    ``smallest``: the least share of a picture that a crop keeps; 1 shows whole pictures only.
    ``mirror``: whether half of the pictures are shown mirrored.
    ``keep``: after how many steps the state is stored for resuming.
    """

    rates: Rates = field(default_factory=lambda: Rates(weights=3e-3, scales=1e-3, affine=2e-4))
    iterations: int = 1000
    batch: int = 16
    smallest: float = 0.35
    mirror: bool = True
    keep: int = 100

    def __call__(self, job: Finish) -> nn.Module:
        """The model after training."""
        return fitted(self.trained(job, trainable(job.model, job.layers, job.sites)))

    def trained(self, job: Finish, model: nn.Module) -> nn.Module:
        """The trainable model after training."""
        optimizer = self.rates.optimizer(model)
        start = self._resumed(job, model, optimizer)
        steps = range(start, self.iterations)
        with torch.random.fork_rng():
            for step in job.progress.track(steps, "distilling", len(steps)):
                torch.manual_seed(job.seed * 1_000_003 + step)
                images = shown(job.samples, self._drawn(job, step), self.smallest, self.mirror)
                with torch.no_grad():
                    wanted = job.model(images)
                follow_cosine(optimizer, step / self.iterations)
                optimizer.zero_grad(set_to_none=True)
                softened(model(images), wanted, 1.0).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                if (step + 1) % self.keep == 0 or step + 1 == self.iterations:
                    job.store.save("distilled", _state(optimizer, step + 1))
        for parameter in model.parameters():
            parameter.requires_grad = False
        return model

    def _drawn(self, job: Finish, step: int) -> Tensor:
        """The pictures of one step: every picture once before any is shown again."""
        count, size = len(job.samples), min(self.batch, len(job.samples))
        per_round = count // size
        generator = torch.Generator().manual_seed(job.seed + step // per_round)
        order = torch.randperm(count, generator=generator)
        first = step % per_round * size
        return order[first : first + size]

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


def shown(samples: Samples, index: Tensor, smallest: float, mirror: bool) -> Tensor:
    """Network input of some pictures, cropped to a random part and mirrored at random."""
    images = samples.inputs(index)
    if smallest >= 1 and not mirror:
        return images
    views = []
    for image in images:
        view = _cropped(image, smallest) if smallest < 1 else image
        views.append(view.flip(-1) if mirror and float(torch.rand(())) < 0.5 else view)
    return torch.stack(views)


def _cropped(image: Tensor, smallest: float) -> Tensor:
    """A random part of the picture, nearly of its proportions, at its size."""
    height, width = image.shape[-2:]
    share = math.sqrt(float(torch.empty(()).uniform_(smallest, 1.0)))
    stretch = math.sqrt(float(torch.empty(()).uniform_(0.8, 1.25)))
    rows = max(1, min(height, round(height * share * stretch)))
    columns = max(1, min(width, round(width * share / stretch)))
    top = int(torch.randint(height - rows + 1, ()))
    left = int(torch.randint(width - columns + 1, ()))
    part = image[None, :, top : top + rows, left : left + columns]
    return F.interpolate(part, size=(height, width), mode="bilinear", align_corners=False)[0]
