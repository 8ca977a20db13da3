"""The contract of a base method, and the cache of its fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lampq.calibrate import LayerStats, MatmulStats, Stats
from lampq.progress import Progress
from lampq.quant.half import halved
from lampq.quant.modules import LayerFit, MatmulFit, SiteFit, SumFit, applied, assemble
from lampq.quant.prefix import applied_to_rows
from lampq.types import (
    DETECTOR_ROLES,
    BitPlan,
    LayerBits,
    LayerSpec,
    MatmulSpec,
    ModelGraph,
    SumSpec,
)


@dataclass(frozen=True, slots=True)
class LinearView:
    """A linear layer or convolution as a matrix: y = weight @ x + bias.

    Attributes:
        spec: Its name, role, block and norm.
        weight: (outputs, inputs).
        bias: (outputs,).
    """

    spec: LayerSpec
    weight: Tensor
    bias: Tensor

    @classmethod
    def of(cls, model: nn.Module, spec: LayerSpec) -> LinearView:
        """The view of one layer; a missing bias is zero.

        A transposed convolution of patches has a row for every number of a patch.
        """
        module = model.get_submodule(spec.name)
        if isinstance(module, nn.ConvTranspose2d):
            matrix = module.weight.detach().flatten(1).T.contiguous()
            spots = module.weight.shape[2:].numel()
            own = matrix.new_zeros(module.out_channels) if module.bias is None else module.bias
            return cls(spec, matrix, own.detach().repeat_interleave(spots))
        assert isinstance(module, nn.Linear | nn.Conv2d), "discovery names linear layers only"
        weight = module.weight.detach().flatten(1)
        bias = module.bias
        return cls(spec, weight, weight.new_zeros(len(weight)) if bias is None else bias.detach())


class Method(Protocol):
    """Quantizes one layer at one width, from float parameters and calibration statistics.

    A fit depends on this layer, this width and these statistics only. Nothing is modified.

    A method may have more attributes. ``wants_gradients = True`` asks for the gradients in the
    statistics, ``block_images = n`` for views of the blocks on n images. One that quantizes
    residual sums too is a ``SumMethod``.
    """

    name: ClassVar[str]

    def fit(self, layer: LinearView, bits: LayerBits, stats: LayerStats) -> LayerFit:
        """The layer at that width."""
        ...

    def fit_matmul(
        self, site: MatmulSpec, left_bits: int, right_bits: int, stats: MatmulStats
    ) -> MatmulFit:
        """The operand quantizers of an attention matmul."""
        ...


@runtime_checkable
class SumMethod(Protocol):
    """A method that quantizes residual sums."""

    def fit_sum(self, site: SumSpec, bits: int, stats: LayerStats) -> SumFit:
        """The quantizer of a sum, whose values are the inputs of the statistics."""
        ...


def sums_of(graph: ModelGraph, method: object) -> tuple[SumSpec, ...]:
    """The sums that the method quantizes: all or none."""
    return graph.sums if isinstance(method, SumMethod) else ()


class FitStore(Protocol):
    """Keeps fits between runs."""

    def load(self, spec: LayerSpec, bits: LayerBits) -> LayerFit | None:
        """The stored fit, if there is one."""
        ...

    def save(self, fit: LayerFit) -> None:
        """Store a fit."""
        ...

    def load_site(self, spec: MatmulSpec | SumSpec, widths: tuple[int, ...]) -> SiteFit | None:
        """The stored fit of an attention product or a sum, if there is one."""
        ...

    def save_site(self, fit: SiteFit, widths: tuple[int, ...]) -> None:
        """Store the fit of an attention product or a sum."""
        ...


@dataclass(frozen=True, slots=True)
class SiteWidths:
    """The widths of all sites that the plan does not name.

    ``edge``: patch embedding, head and Swin's reduction. ``matmul``: both operands of the attention
    products, and residual sums; or None to follow the plan (q, k, v as the block's qkv, softmax as
    its proj, a sum as the layer before it). ``rest``: what is not quantized, and the scales of the
    weights; 16 or 32. ``behind``: what a detector has behind its backbone; None: as ``edge``.
    """

    edge: LayerBits
    matmul: int | None
    rest: int = 32
    behind: LayerBits | None = None

    def of_layer(self, layer: LayerSpec) -> LayerBits:
        """Widths of a layer that the plan does not name."""
        behind = self.behind if layer.role in DETECTOR_ROLES else None
        return behind or self.edge

    def of_matmul(self, site: MatmulSpec, plan: BitPlan) -> tuple[int, int]:
        """Widths of the left and the right operand."""
        if self.matmul is not None:
            return self.matmul, self.matmul
        own = {
            layer.role.value: plan[layer.name] for layer in plan.layers if layer.block == site.block
        }
        inner = own.get("qkv", self.edge).activation
        outer = own.get("proj", self.edge).activation
        return (inner, inner) if site.kind == "qk" else (outer, inner)

    def of_sum(self, site: SumSpec, plan: BitPlan) -> int:
        """Width of a residual sum."""
        if self.matmul is not None:
            return self.matmul
        before = (plan[x.name] for x in plan.layers if (x.block, x.role) == (site.block, site.role))
        return next(before, self.edge).activation


class FitCache:
    """Fits of a method by layer and width, each computed at most once.

    Fits are independent of each other: they are computed side by side, each on one thread, so that
    the result does not depend on how many there are. The statistics are looked at only where a fit
    is in no store.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: ModelGraph,
        method: Method,
        stats: Mapping[str, Stats],
        sites: SiteWidths,
        *,
        store: FitStore | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.model, self.graph, self.sites = model, graph, sites
        self._method, self._stats, self._store = method, stats, store
        self._progress = progress or Progress()
        self._fits: dict[tuple[str, LayerBits], LayerFit] = {}
        self._matmuls: dict[tuple[str, int, int], MatmulFit] = {}
        self._sums: dict[tuple[str, int], SumFit] = {}
        self._errors: dict[tuple[str, LayerBits], float] = {}

    def at(self, sites: SiteWidths, progress: Progress) -> FitCache:
        """The same fits for another run, with its widths at the sites that no plan names."""
        other = copy(self)
        other.sites, other._progress = sites, progress
        return other

    def stats(self, name: str) -> LayerStats:
        """What a layer sees on the calibration images."""
        stats = self._stats[name]
        assert isinstance(stats, LayerStats), "layers have layer statistics"
        return stats

    def inputs(self, name: str) -> Tensor:
        """Float inputs of a layer on the calibration images, (tokens, channels)."""
        return self.stats(name).inputs

    def _fit(self, key: tuple[str, LayerBits]) -> LayerFit:
        name, bits = key
        spec = self.graph.layer(name)
        with torch.no_grad():
            fit = self._method.fit(LinearView.of(self.model, spec), bits, self.stats(name))
        if self._store is not None:
            self._store.save(fit)
        return fit

    def _fit_matmul(self, key: tuple[str, int, int]) -> MatmulFit:
        name, left_bits, right_bits = key
        stats = self._stats[name]
        assert isinstance(stats, MatmulStats), "matmuls have matmul statistics"
        with torch.no_grad():
            fit = self._method.fit_matmul(self._site(name), left_bits, right_bits, stats)
        if self._store is not None:
            self._store.save_site(fit, (left_bits, right_bits))
        return fit

    def _site(self, name: str) -> MatmulSpec:
        return next(site for site in self.graph.matmuls if site.name == name)

    def _from_store(
        self, layers: list[tuple[str, LayerBits]], matmuls: list[tuple[str, int, int]]
    ) -> None:
        """Take what the store has of these."""
        if self._store is None:
            return
        for name, bits in layers:
            fit = self._store.load(self.graph.layer(name), bits)
            if fit is not None:
                self._fits[name, bits] = fit
        for name, left, right in matmuls:
            site = self._store.load_site(self._site(name), (left, right))
            if isinstance(site, MatmulFit):
                self._matmuls[name, left, right] = site

    def _missing(
        self, layers: Iterable[tuple[str, LayerBits]], matmuls: Iterable[tuple[str, int, int]]
    ) -> tuple[list[tuple[str, LayerBits]], list[tuple[str, int, int]]]:
        """Those that are not here, each once."""
        return (
            [key for key in dict.fromkeys(layers) if key not in self._fits],
            [key for key in dict.fromkeys(matmuls) if key not in self._matmuls],
        )

    def prefetch(
        self,
        layers: Iterable[tuple[str, LayerBits]] = (),
        matmuls: Iterable[tuple[str, int, int]] = (),
    ) -> None:
        """Compute the fits that are not there yet."""
        wanted = self._missing(layers, matmuls)
        if not any(wanted):
            return
        with self._progress.stage("fit"):
            self._from_store(*wanted)
        new_layers, new_matmuls = self._missing(*wanted)
        total = len(new_layers) + len(new_matmuls)
        if not total:
            return
        self._stats.get("")  # statistics that wait to be asked for are not made on many threads
        threads = torch.get_num_threads()
        pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
        with self._progress.stage("fit"):
            try:
                fitted: Iterator[LayerFit | MatmulFit] = chain(
                    pool.map(self._fit, new_layers), pool.map(self._fit_matmul, new_matmuls)
                )
                products = iter(new_matmuls)
                for fit in self._progress.track(fitted, f"fitting {total} sites", total):
                    if isinstance(fit, LayerFit):
                        self._fits[fit.spec.name, fit.bits] = fit
                    else:
                        self._matmuls[next(products)] = fit
            finally:
                pool.shutdown(cancel_futures=True)
                torch.set_num_threads(threads)

    def layer(self, name: str, bits: LayerBits) -> LayerFit:
        """The fit of one layer at one width."""
        self.prefetch([(name, bits)])
        return self._fits[name, bits]

    def matmul(self, site: MatmulSpec, left_bits: int, right_bits: int) -> MatmulFit:
        """The fit of one attention product."""
        key = (site.name, left_bits, right_bits)
        self.prefetch(matmuls=[key])
        return self._matmuls[key]

    def _sum(self, site: SumSpec, bits: int) -> SumFit:
        """The fit of one residual sum, for methods that have them."""
        key = (site.name, bits)
        if key not in self._sums:
            known = None if self._store is None else self._store.load_site(site, (bits,))
            if not isinstance(known, SumFit):
                stats, method = self._stats[site.name], self._method
                assert isinstance(stats, LayerStats), "sums have layer statistics"
                assert isinstance(method, SumMethod), "only asked of these"
                known = method.fit_sum(site, bits, stats)
                if self._store is not None:
                    self._store.save_site(known, (bits,))
            self._sums[key] = known
        return self._sums[key]

    def of_plan(self, plan: BitPlan) -> tuple[list[LayerFit], list[SiteFit]]:
        """Fits of every site of the model under a plan."""
        layers = [
            (spec.name, plan.get(spec.name, self.sites.of_layer(spec)))
            for spec in self.graph.layers
        ]
        matmuls = [(site.name, *self.sites.of_matmul(site, plan)) for site in self.graph.matmuls]
        self.prefetch(layers, matmuls)
        sites: list[SiteFit] = [self._matmuls[key] for key in matmuls]
        sums = sums_of(self.graph, self._method)
        sites += [self._sum(site, self.sites.of_sum(site, plan)) for site in sums]
        return [self._fits[key] for key in layers], sites

    def assembled(self, plan: BitPlan) -> nn.Module:
        """The quantized model of a plan, as its file holds it."""
        return self.stored(assemble(self.model, *self.of_plan(plan)))

    def stored(self, model: nn.Module) -> nn.Module:
        """The given quantized model, with what is not a code in the precision of its file."""
        return halved(model) if self.sites.rest == 16 else model

    def error(self, name: str, bits: LayerBits) -> float:
        """Relative squared error of the layer's output on its float inputs (bias apart)."""
        key = (name, bits)
        if key not in self._errors:
            view = LinearView.of(self.model, self.graph.layer(name))
            stats = self.stats(name)
            exact = stats.inputs @ view.weight.T
            given = rows_output(self.layer(name, bits), stats.inputs, stats.first)
            error = given - view.bias - exact
            self._errors[key] = float(error.square().sum() / exact.square().sum())
        return self._errors[key]


def layer_output(fit: LayerFit, inputs: Tensor) -> Tensor:
    """Output of a fitted layer on inputs (..., tokens, channels) of the float model."""
    return _output(fit, applied(fit.input_quantizer, _folded(fit, inputs)))


def rows_output(fit: LayerFit, rows: Tensor, first: Tensor | None) -> Tensor:
    """Likewise on single tokens; ``first`` tells which are of the prefix."""
    return _output(fit, applied_to_rows(fit.input_quantizer, _folded(fit, rows), first))


def _folded(fit: LayerFit, inputs: Tensor) -> Tensor:
    return inputs if fit.fold is None else fit.fold.of_inputs(inputs)


def _output(fit: LayerFit, quantized: Tensor) -> Tensor:
    return applied(fit.output_quantizer, quantized @ fit.weight.T + fit.bias)
