"""Layers solved anew, one after another, in the model that is quantized up to them.

A fit looks at its layer alone. Here every layer sees what the quantized layers before it give. One
that reads the stream of the residual sums is rounded again for these inputs. One that writes to it
is solved for what would bring the stream back to that of the float model, so that errors do not add
up from block to block. Both are least squares on all tokens of all images with a ridge towards the
float weight, followed by GPTQ (Frantar et al., ICLR 2023); nothing is trained. That the target is
the output of the float model on its own inputs is the idea of GPTAQ (Li et al., ICML 2025).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from lampq.hooks import ReachedError, arguments_of, recording_gradients
from lampq.passes import backward
from lampq.quant.modules import LayerFit, assemble, quantized_layer, replace_module
from lampq.quant.uniform import UniformQuantizer
from lampq.reconstruct.base import Finish
from lampq.reconstruct.feed import Call, Feed
from lampq.reconstruct.heads import Heads
from lampq.reconstruct.least_squares import Problem
from lampq.tokens import token_gradients
from lampq.types import LayerRole, LayerSpec

# images whose gradients tell how much each position counts
FISHER_IMAGES = 64
# how far a token of the stream is brought back at once, in middle errors
FARTHEST = 2.0


@dataclass(frozen=True, slots=True)
class Align:
    """Least squares for one layer after another.

    ``ridge``: how strongly a weight is held at its float value, in mean squares of its inputs.
    ``focus``: the share of a token's weight that follows the Fisher information at its position;
    the rest is even. ``heads``: how the head is solved in the end, None to leave it as it is.
    """

    ridge: float = 1.0
    focus: float = 0.3
    batch: int = 16
    heads: Heads | None = field(default_factory=Heads)

    def __call__(self, job: Finish) -> nn.Module:
        """The quantized model."""
        return self.assembled(self.aligned(job))

    def assembled(self, job: Finish) -> nn.Module:
        """The quantized model of a job whose layers are aligned."""
        model = assemble(job.model, job.layers, job.sites)
        return model if self.heads is None else self.heads(job, model)

    @torch.no_grad()
    def aligned(self, job: Finish) -> Finish:
        """The job with all layers inside blocks solved anew."""
        inside = [fit for fit in job.layers if fit.spec.block >= 0]
        done = [_stored(job, fit) for fit in inside]
        fits = {fit.spec.name: fit for fit in job.layers}
        fits |= {fit.spec.name: fit for fit in done if fit is not None}
        left = done.index(None) if None in done else len(done)
        if left < len(inside):
            self._align(job, inside, left, fits)
        return replace(job, layers=tuple(fits.values()))

    def _align(
        self, job: Finish, inside: list[LayerFit], left: int, fits: dict[str, LayerFit]
    ) -> None:
        """Solve the layers from the first that is left on."""
        started = tuple(fits[fit.spec.name] for fit in job.layers)
        model = assemble(job.model, started, job.sites)
        counts = self._counts(job, [fit.spec for fit in inside])
        feed = Feed(job.model, model, job.graph.blocks, job.samples)
        for fit in job.progress.track(inside[left:], "aligning layers", len(inside) - left):
            name = fit.spec.name
            while feed.number < fit.spec.block:
                feed.advance()
            fits[name] = self._solved(job, feed, fit, counts[name])
            job.store.save(_key(fit.spec), _tensors(fits[name]))
            replace_module(model, name, quantized_layer(fits[name], job.model.get_submodule(name)))

    def _counts(self, job: Finish, layers: list[LayerSpec]) -> Mapping[str, Tensor]:
        """How much each position of a layer's output counts, one on average."""
        names = [spec.name for spec in layers]
        generator = torch.Generator().manual_seed(job.seed)
        total: dict[str, Tensor] = {}
        few = job.samples.subset(FISHER_IMAGES, job.seed)
        for images, _ in few.batches(self.batch):
            with recording_gradients(job.model, names) as slopes:
                backward(job.model, images, generator)
            for name in names:
                rows = token_gradients(job.model.get_submodule(name), slopes[name])
                power = rows.square().sum(dim=1).reshape(len(images), -1).sum(dim=0)
                total[name] = total[name] + power if name in total else power
        even = 1 - self.focus
        return {n: self.focus * p / p.mean().clamp_min(1e-30) + even for n, p in total.items()}

    def _solved(self, job: Finish, feed: Feed, fit: LayerFit, counts: Tensor) -> LayerFit:
        """The fit solved anew, or as it was where that would not do."""
        if not isinstance(fit.weight_quantizer, UniformQuantizer):
            return fit
        problem = Problem(fit, job.model.get_submodule(fit.spec.name), counts)
        name = fit.spec.name.removeprefix(f"{feed.blocks[feed.number]}.")
        writer = _Writer.of(job, feed, fit.spec)
        exact = job.model.get_submodule(feed.blocks[feed.number])
        call = feed.call
        for start in range(0, len(feed.inputs), self.batch):
            part = slice(start, start + self.batch)
            if writer is None:
                given, _ = arguments_of(
                    feed.block, name, feed.inputs[part], *call.rest, **call.named
                )
                own = problem.exact(given[0])
                problem.add(given[0], own, own)
            else:
                found = writer.passage(feed.block, feed.inputs[part], call)
                wanted = writer.passage(exact, feed.float_inputs[part], call)
                target = wanted.output + wanted.brought_back(found)
                problem.add(found.inputs, wanted.output, target)
            if problem.uneven:
                return fit
        return problem.solved(self.ridge)


@dataclass(frozen=True, slots=True)
class _Passage:
    """What a layer that writes to the residual stream is given and gives, in one pass.

    ``stream`` is the stream behind the layer with its output taken out, ``place`` stands for this
    output in it.
    """

    inputs: Tensor
    output: Tensor
    place: Tensor
    stream: Tensor

    def brought_back(self, other: _Passage) -> Tensor:
        """What the layer would have to add to bring the other stream to this one."""
        error = self.stream.detach() - other.stream.detach()
        size = error.norm(dim=-1, keepdim=True)
        # few tokens are huge: to bring these back would cost all others
        shorter = (FARTHEST * size.median() / size.clamp_min(1e-30)).clamp(max=1.0)
        # windows and shifts reorder tokens between layer and stream, the gradient goes the way back
        (found,) = torch.autograd.grad(self.stream, self.place, error * shorter)
        return found


@dataclass(frozen=True, slots=True)
class _Writer:
    """A layer that writes to the stream; ``norm`` reads it next, or nothing inside the block."""

    name: str
    norm: str | None

    @classmethod
    def of(cls, job: Finish, feed: Feed, spec: LayerSpec) -> _Writer | None:
        """The writer of this layer, None if it is none or nobody knows who reads the stream."""
        prefix = f"{feed.blocks[feed.number]}."
        if spec.role is LayerRole.FC2:
            return cls(spec.name.removeprefix(prefix), None)
        beside = [x for x in job.graph.layers if x.block == spec.block]
        norm = next((x.norm for x in beside if x.role is LayerRole.FC1), None)
        if spec.role is not LayerRole.PROJ or norm is None:
            return None
        return cls(spec.name.removeprefix(prefix), norm.removeprefix(prefix))

    def passage(self, block: nn.Module, inputs: Tensor, call: Call) -> _Passage:
        """One pass through the block, no farther than needed."""
        seen: dict[str, Tensor] = {}

        def behind(_module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
            seen["inputs"], seen["output"] = arguments[0], output
            torch.set_grad_enabled(True)
            seen["place"] = torch.zeros_like(output).requires_grad_()
            return seen["place"]

        def at_norm(_module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            seen["stream"] = arguments[0]
            raise ReachedError

        handles = [block.get_submodule(self.name).register_forward_hook(behind)]
        if self.norm is not None:
            handles.append(block.get_submodule(self.norm).register_forward_pre_hook(at_norm))
        try:
            with torch.no_grad():
                seen["stream"] = block(inputs, *call.rest, **call.named)
        except ReachedError:
            pass
        finally:
            for handle in handles:
                handle.remove()
        return _Passage(**seen)


def _key(spec: LayerSpec) -> str:
    return f"aligned {spec.name}"


def _tensors(fit: LayerFit) -> Mapping[str, Tensor]:
    """What alignment changes in a fit."""
    grid = fit.weight_quantizer
    scales = {"scale": grid.scale, "zero": grid.zero} if isinstance(grid, UniformQuantizer) else {}
    return {"codes": fit.codes, "bias": fit.bias, **scales}


def _stored(job: Finish, fit: LayerFit) -> LayerFit | None:
    """The fit as an earlier run has solved it."""
    stored = job.store.load(_key(fit.spec))
    if stored is None:
        return None
    grid = fit.weight_quantizer
    if "scale" in stored:
        grid = UniformQuantizer(fit.bits.weight, stored["scale"], stored["zero"])
    return replace(fit, codes=stored["codes"], bias=stored["bias"], weight_quantizer=grid)
