"""Reconstruction of the whole model at once.

The quantized model learns the answers of the float one, and the outputs of its blocks, on the
calibration images.

Codes, scales, biases and norms of all layers are trained together, so that a layer makes up for
what the others lose. The float model answers for every picture that is shown, so pictures may be
cropped, mirrored and mixed at will: a thousand of them give many more, and are not learned by
heart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lampq.hooks import recording_outputs
from lampq.quant.modules import assemble
from lampq.reconstruct.align import Align
from lampq.reconstruct.base import Finish, Rates, follow_cosine
from lampq.reconstruct.blocks import softened
from lampq.reconstruct.trainable import fitted, trainable


@dataclass(frozen=True, slots=True)
class Distill:
    """Training of all layers by the divergence from the float model.

    ``smallest``: the least share of a picture that a crop keeps; 1 shows whole pictures only.
    ``mirror``: whether half of the pictures are shown mirrored. ``mixed``: the share of pictures
    that are blended with another one, or have a part of it in them. ``features``: weight of the
    relative squared error of the block outputs beside the divergence of the answers. ``start``:
    what is done before, None to train the fits as they are. ``keep``: after how many steps the
    state is stored for resuming.
    """

    rates: Rates = field(default_factory=lambda: Rates(weights=1e-3, scales=3e-3, affine=1e-3))
    iterations: int = 1500
    batch: int = 16
    smallest: float = 0.35
    mirror: bool = True
    mixed: float = 0.5
    features: float = 1.0
    start: Align | None = field(default_factory=Align)
    keep: int = 100

    def __call__(self, job: Finish) -> nn.Module:
        """The model after training."""
        begun = job
        if self.start is not None:
            begun = self.start.aligned(job)
            job.offer(assemble(job.model, begun.layers, job.sites))
        return fitted(self.trained(job, trainable(job.model, begun.layers, job.sites)))

    def trained(self, job: Finish, model: nn.Module) -> nn.Module:
        """The trainable model after training."""
        optimizer = self.rates.optimizer(model)
        start = self._resumed(job, model, optimizer)
        steps = range(start, self.iterations)
        for step in job.progress.track(steps, "distilling", len(steps)):
            follow_cosine(optimizer, step / self.iterations)
            optimizer.zero_grad(set_to_none=True)
            self._loss(job, model, self._shown(job, step)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if (step + 1) % self.keep == 0 or step + 1 == self.iterations:
                job.store.save("distilled", _state(optimizer, step + 1))
        for parameter in model.parameters():
            parameter.requires_grad = False
        return model

    def _loss(self, job: Finish, model: nn.Module, pictures: Tensor) -> Tensor:
        """Divergence of the answers, and mean relative error of the block outputs."""
        blocks = list(job.graph.blocks) if self.features else []
        with torch.no_grad(), recording_outputs(job.model, blocks) as wanted:
            answers = job.model(pictures)
        with recording_outputs(model, blocks) as found:
            loss = softened(model(pictures), answers, 1.0)
        errors = [_relative_error(found[name], wanted[name]) for name in blocks if name in wanted]
        return loss + self.features * torch.stack(errors).mean() if errors else loss

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


def _relative_error(found: Tensor, wanted: Tensor) -> Tensor:
    """Squared error of a block output in parts of its variance."""
    centre = wanted.mean(dim=tuple(range(wanted.dim() - 1)))
    variance = (wanted - centre).square().mean().clamp_min(1e-12)
    return (found - wanted).square().mean() / variance


def shown(images: Tensor, smallest: float, generator: torch.Generator, *, mirror: bool) -> Tensor:
    """Each image cropped to a random part, and mirrored or not."""
    views = []
    for image in images:
        view = _cropped(image, smallest, generator) if smallest < 1 else image
        turned = mirror and float(torch.rand((), generator=generator)) < 0.5
        views.append(view.flip(-1) if turned else view)
    return torch.stack(views)


def mixed(images: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """This share of the images mixed with the next one each.

    Half of them are blended (mixup, Zhang et al., ICLR 2018), half get a rectangle of the other
    (CutMix, Yun et al., ICCV 2019).
    """
    result = images.clone()
    height, width = images.shape[-2:]
    for number in range(len(images)):
        draw, high, wide, down, right = torch.rand(5, generator=generator).tolist()
        other = images[(number + 1) % len(images)]
        if draw < share / 2:
            result[number] = high * images[number] + (1 - high) * other
        elif draw < share:
            rows, columns = round(height * math.sqrt(high)), round(width * math.sqrt(wide))
            top, left = round((height - rows) * down), round((width - columns) * right)
            part = (..., slice(top, top + rows), slice(left, left + columns))
            result[number][part] = other[part]
    return result


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
