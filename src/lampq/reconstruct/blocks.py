"""Reconstruction block by block.

The codes and scales of a block are trained until its output is that of the float block.

The recipes differ in what the block is given, what is compared, and how codes may move:
QDrop (Wei et al., ICLR 2022), PD-Quant (Liu et al., CVPR 2023), and the second stage of AdaLog
(Wu et al., ECCV 2024), which is that of BRECQ (Li et al., ICLR 2021).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lampq.data import Samples
from lampq.hooks import recording_gradients
from lampq.passes import backward
from lampq.quant.modules import replace_module
from lampq.reconstruct.base import Finish, Rates, follow_cosine, roundness
from lampq.reconstruct.feed import Feed
from lampq.reconstruct.precision import Precision, computing
from lampq.reconstruct.trainable import Rounding, fitted, quantizers, trainable

WARM_UP = 0.2
ROUNDNESS_POWERS = (20.0, 2.0)
FISHER_IMAGES = 128
Tail = Callable[[Tensor, Tensor], Tensor]
"""The logits of images, given the output of a block."""


@dataclass(frozen=True, slots=True)
class BlockRecipe:
    """How the blocks are trained.

    ``inputs``: of the float model, or of the model whose earlier blocks are quantized; with
    ``drop`` that share of the block's input and of every activation inside it stays float.
    ``loss``: squared error of the block output, plain or weighted by the diagonal of the Fisher
    information there. ``prediction``: weight of the divergence of the logits when the rest of the
    model is float, at ``temperature``. ``pull``: weight of the regulariser that makes codes whole.
    """

    rounding: Rounding
    rates: Rates
    inputs: Literal["float", "quantized"] = "quantized"
    drop: float = 0.5
    loss: Literal["plain", "fisher"] = "plain"
    prediction: float = 0.0
    temperature: float = 4.0
    pull: float = 0.01
    iterations: int = 1000
    batch: int = 32
    precision: Precision = "auto"

    def __call__(self, job: Finish) -> nn.Module:
        """The model with every block reconstructed, in order."""
        model = trainable(job.model, job.layers, job.sites, self.rounding)
        return fitted(self.trained(job, model))

    def trained(self, job: Finish, model: nn.Module) -> nn.Module:
        """The trainable model after all blocks."""
        blocks = job.graph.blocks
        weights = fisher_weights(job.model, blocks, job.samples, job.seed) if self._fisher else {}
        feed = Feed(job.model, model, blocks, job.samples)
        for number, name in enumerate(blocks):
            key = f"block {number}"
            stored = job.store.load(key)
            if stored is None:
                label = f"reconstructing block {number + 1} of {len(blocks)}"
                with torch.random.fork_rng():
                    torch.manual_seed(job.seed + number)
                    steps = job.progress.track(range(self.iterations), label, self.iterations)
                    self._train(job, feed, weights.get(name), steps)
                job.store.save(key, model.get_submodule(name).state_dict())
            else:
                model.get_submodule(name).load_state_dict(dict(stored))
            for parameter in model.parameters():
                parameter.requires_grad = False
            if number + 1 < len(blocks):
                feed.advance()
        return model

    @property
    def _fisher(self) -> bool:
        return self.loss == "fisher"

    def _train(self, job: Finish, feed: Feed, weight: Tensor | None, steps: Iterator[int]) -> None:
        block = feed.block
        optimizer = self.rates.optimizer(block)
        for quantizer in quantizers(block):
            quantizer.drop = self.drop
        rest = tail(job.model, feed.blocks, feed.number) if self.prediction else None
        for step in steps:
            index = torch.randint(len(feed.inputs), (min(self.batch, len(feed.inputs)),))
            follow_cosine(optimizer, step / self.iterations)
            optimizer.zero_grad(set_to_none=True)
            with computing(self.precision):
                loss = self._loss(job, feed, index, weight, rest, step / self.iterations)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        for quantizer in quantizers(block):
            quantizer.drop = 0.0

    def _loss(
        self,
        job: Finish,
        feed: Feed,
        index: Tensor,
        weight: Tensor | None,
        rest: Tail | None,
        done: float,
    ) -> Tensor:
        exact, target = feed.float_inputs[index], feed.targets[index]
        inputs = exact
        if self.inputs == "quantized":
            inputs = feed.inputs[index]
            if self.drop:
                inputs = torch.where(torch.rand_like(inputs) < self.drop, exact, inputs)
        output = feed.block(inputs, *feed.call.rest, **feed.call.named)
        squared = (output - target).square()
        loss: Tensor = (squared if weight is None else squared * weight).sum(dim=-1).mean()
        if rest is not None:
            for quantizer in quantizers(feed.block):
                quantizer.drop = 0.0
            whole = feed.block(feed.inputs[index], *feed.call.rest, **feed.call.named)
            for quantizer in quantizers(feed.block):
                quantizer.drop = self.drop
            images = job.samples.inputs(index)
            with torch.no_grad():
                wanted = rest(images, target)
            loss = loss + self.prediction * softened(rest(images, whole), wanted, self.temperature)
        if self.rounding == "nearest two" and done > WARM_UP:
            first, last = ROUNDNESS_POWERS
            power = first + (last - first) * (done - WARM_UP) / (1 - WARM_UP)
            loss = loss + self.pull * roundness(feed.block, power)
        return loss


def softened(logits: Tensor, reference: Tensor, temperature: float) -> Tensor:
    """Mean KL divergence of softened distributions."""
    log_p = (reference.float() / temperature).log_softmax(dim=1)
    log_q = (logits.float() / temperature).log_softmax(dim=1)
    return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)


class _Given(nn.Module):
    """Stands in for a block and gives a stored output."""

    stored: Tensor | None = None

    def forward(self, _x: Tensor, *_rest: Any, **_named: Any) -> Tensor:
        assert self.stored is not None, "set before the pass"
        return self.stored


class _Skipped(nn.Module):
    """Stands in for a block whose output is not needed."""

    def forward(self, x: Tensor, *_rest: Any, **_named: Any) -> Tensor:
        return x


def tail(model: nn.Module, blocks: Sequence[str], number: int) -> Tail:
    """The float model after a block, as a function of images and of the block's output."""
    shortened = copy.deepcopy(model)
    given = _Given()
    for name in blocks[:number]:
        replace_module(shortened, name, _Skipped())
    replace_module(shortened, blocks[number], given)

    def rest(images: Tensor, output: Tensor) -> Tensor:
        given.stored = output
        logits: Tensor = shortened(images)
        return logits

    return rest


def fisher_weights(
    model: nn.Module, blocks: Sequence[str], samples: Samples, seed: int
) -> dict[str, Tensor]:
    """Mean squared gradient of the log-likelihood at every entry of the block outputs.

    Labels are drawn from the model. The mean over entries is one; a tenth of the weight is even.
    """
    few = samples.subset(FISHER_IMAGES, seed)
    generator = torch.Generator().manual_seed(seed)
    totals: dict[str, Tensor] = {}
    with recording_gradients(model, list(blocks)) as slopes:
        for images, _ in few.batches(16):
            slopes.clear()
            backward(model, images, generator)
            for name, slope in slopes.items():
                total = slope.square().sum(dim=0)
                totals[name] = totals[name] + total if name in totals else total
    return {
        name: 0.9 * total / total.mean().clamp_min(1e-30) + 0.1 for name, total in totals.items()
    }
