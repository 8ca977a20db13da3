from __future__ import annotations

import copy
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from conftest import Case
from torch.nn import functional as F

from lampq.calibrate import LayerStats, MatmulStats, collect
from lampq.data import Samples
from lampq.errors import DataError
from lampq.evaluate import divergence
from lampq.methods import METHODS, FitCache, LinearView, Method, SiteWidths
from lampq.methods.minmax import MinMax, per_row
from lampq.metrics.base import Evidence
from lampq.metrics.output import MeasuredHarm, OutputFisher, ReconstructionError
from lampq.quant.modules import LayerFit, MatmulFit, assemble
from lampq.types import LayerBits, MatmulSpec

CHOICES = tuple(LayerBits(b, b) for b in range(2, 9))
METRICS = {
    "projected": OutputFisher(form="projected"),
    "diagonal": OutputFisher(form="diagonal"),
    "both": OutputFisher(form="both"),
    "kl": MeasuredHarm(),
    "recon": ReconstructionError(),
}
metrics = pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)


def evidence_of(
    case: Case,
    method: Method | None = None,
    *,
    images: int = 6,
    labels: bool = True,
) -> Evidence:
    generator = torch.Generator().manual_seed(11)
    pictures = torch.randn(images, *case.samples.images.shape[1:], generator=generator)
    answers = torch.randint(10, (images,), generator=generator) if labels else None
    samples = Samples(pictures, answers)
    stats = collect(case.model, case.graph, samples)
    sites = SiteWidths(LayerBits(8, 8), 4)
    fits = FitCache(case.model, case.graph, method or MinMax(), stats, sites)
    return Evidence(case.model, case.graph, fits, samples, seed=0)


class OnTheGrid:
    """A method that leaves inputs as they are; weights on its grid are kept exactly."""

    name: ClassVar[str] = "grid"

    def fit(self, layer: LinearView, bits: LayerBits, stats: LayerStats) -> LayerFit:
        quantizer = per_row(layer.weight, bits.weight)
        codes = quantizer.encode(layer.weight).to(torch.uint8)
        return LayerFit(layer.spec, bits, codes, layer.bias, quantizer, None)

    def fit_matmul(
        self, site: MatmulSpec, left_bits: int, right_bits: int, stats: MatmulStats
    ) -> MatmulFit:
        raise AssertionError


@metrics
def test_costs_are_finite_and_never_negative(case: Case, metric: OutputFisher) -> None:
    table = metric(evidence_of(case), CHOICES).table
    assert table.cost.shape == (len(case.graph.allocatable), len(CHOICES))
    assert np.isfinite(table.cost).all()
    # two float sums of the same terms may differ in their last digits
    assert (table.cost >= -1e-9).all()


@metrics
def test_costs_fall_from_two_to_eight_bits(case: Case, metric: OutputFisher) -> None:
    cost = metric(evidence_of(case, images=16), CHOICES).table.cost
    assert (cost[:, -1] < 0.05 * cost[:, 0]).all()
    assert cost[:, -1].sum() < cost[:, 3].sum() < cost[:, 0].sum()


@metrics
def test_rows_and_columns_are_those_asked_for(vit: Case, metric: OutputFisher) -> None:
    evidence = evidence_of(vit)
    few = metric(evidence, CHOICES[1:3]).table
    assert few.layers == vit.graph.allocatable
    assert few.choices == CHOICES[1:3]
    everything = metric(replace(evidence_of(vit)), CHOICES).table
    np.testing.assert_allclose(few.cost, everything.cost[:, 1:3], rtol=1e-5)


PAIRS = tuple(LayerBits(w, a) for w in (2, 4) for a in (2, 6))


@metrics
def test_a_pair_of_widths_costs_what_it_costs_alone(vit: Case, metric: OutputFisher) -> None:
    evidence = evidence_of(vit)
    cost = metric(evidence, PAIRS).table.cost
    assert cost.shape == (len(vit.graph.allocatable), 4)
    alone = metric(evidence_of(vit), (LayerBits(4, 4), LayerBits(4, 6))).table.cost[:, 1]
    np.testing.assert_allclose(cost[:, 3], alone, rtol=1e-5)
    # 2/2 is worse than 2/6 and than 4/2, and those than 4/6
    total = cost.sum(axis=0)
    assert total[0] > max(total[1], total[2]) > min(total[1], total[2]) > total[3]


@metrics
def test_samples_without_labels_do(vit: Case, metric: OutputFisher) -> None:
    table = metric(evidence_of(vit, labels=False), CHOICES[:2]).table
    assert np.isfinite(table.cost).all()


def test_data_labels_that_are_missing_are_an_error(vit: Case) -> None:
    with pytest.raises(DataError, match="needs labels"):
        OutputFisher(labels="data")(evidence_of(vit, labels=False), CHOICES)


@pytest.mark.parametrize("method", ["minmax", "repq"])
def test_the_expected_divergence_agrees_with_the_measured_one_where_errors_are_small(
    case: Case, method: str
) -> None:
    # second order holds where errors are small; many draws of labels make the mean steady
    narrow = tuple(LayerBits(b, b) for b in (6, 7, 8))
    evidence = evidence_of(case, METHODS.get(method)(), images=24)
    expected = OutputFisher(draws=16, form="projected")(evidence, narrow).table.cost
    measured = MeasuredHarm()(evidence, narrow).table.cost
    assert (measured > 0).all()
    ratio = expected / measured
    assert 1 / 3 < np.median(ratio) < 3
    # a single layer is noisier: only few of a hundred may be further off than a factor of four
    assert np.mean((ratio < 1 / 4) | (ratio > 4)) < 0.1


def test_the_measured_divergence_is_that_of_the_model_with_one_layer_quantized(case: Case) -> None:
    evidence = evidence_of(case)
    table = MeasuredHarm()(evidence, CHOICES[:2]).table
    with torch.no_grad():
        reference = case.model(evidence.samples.images)
        for layer, row in zip(table.layers, table.cost, strict=True):
            model = assemble(case.model, [evidence.fits.layer(layer.name, CHOICES[0])])
            logits = model(evidence.samples.images)
            expected = divergence(logits, reference)
            assert row[0] == pytest.approx(expected, rel=1e-4, abs=1e-9)


def test_the_measured_loss_is_the_rise_of_the_cross_entropy(case: Case) -> None:
    evidence = evidence_of(case)
    table = MeasuredHarm(signal="loss")(evidence, CHOICES[:2]).table
    labels = evidence.samples.require_labels("a test")
    with torch.no_grad():
        before = float(F.cross_entropy(case.model(evidence.samples.images), labels))
        for layer, row in zip(table.layers, table.cost, strict=True):
            model = assemble(case.model, [evidence.fits.layer(layer.name, CHOICES[0])])
            after = float(F.cross_entropy(model(evidence.samples.images), labels))
            assert row[0] == pytest.approx(after - before, rel=1e-3, abs=1e-5)


def test_without_labels_the_loss_is_that_of_the_float_answers(vit: Case) -> None:
    evidence = evidence_of(vit, labels=False)
    with torch.no_grad():
        answers = vit.model(evidence.samples.images).argmax(dim=1)
    labelled = replace(evidence, samples=replace(evidence.samples, labels=answers))
    costs = [MeasuredHarm(signal="loss")(e, CHOICES[:2]).table.cost for e in (evidence, labelled)]
    assert np.array_equal(*costs)


def test_a_layer_that_quantization_leaves_as_it_is_costs_nothing(vit: Case) -> None:
    model = copy.deepcopy(vit.model)
    untouched = vit.graph.allocatable[2]
    eight = LayerBits(8, 8)
    with torch.no_grad():
        weight = model.get_submodule(untouched.name).weight
        # twice: the grid of values on a grid is that grid but for the last digits
        for _ in range(2):
            weight.copy_(per_row(weight, 8)(weight))
        assert torch.allclose(per_row(weight, 8)(weight), weight, rtol=1e-6, atol=1e-7)
    evidence = evidence_of(replace(vit, model=model), OnTheGrid())
    for metric in (MeasuredHarm(), OutputFisher(form="projected"), ReconstructionError()):
        cost = metric(evidence, (eight,)).table.cost[:, 0]
        row = vit.graph.allocatable.index(untouched)
        assert abs(cost[row]) < 1e-9
        assert (np.delete(cost, row) > 1e-9).sum() >= len(cost) - 3


def test_the_reconstruction_error_is_relative_to_the_output(vit: Case) -> None:
    evidence = evidence_of(vit)
    table = ReconstructionError()(evidence, CHOICES[:2]).table
    layer = vit.graph.allocatable[1]
    fit = evidence.fits.layer(layer.name, CHOICES[1])
    x = evidence.fits.inputs(layer.name)
    weight = vit.model.get_submodule(layer.name).weight
    with torch.no_grad():
        exact = x @ weight.T
        error = fit.input_quantizer(x) @ fit.weight.T - exact  # type: ignore[misc]
    expected = float(error.square().sum() / exact.square().sum())
    assert table.cost[1, 1] == pytest.approx(expected, rel=1e-4)


def test_the_mean_of_both_forms_is_geometric(vit: Case) -> None:
    tables = [
        OutputFisher(form=form)(evidence_of(vit), CHOICES[:3]).table.cost  # type: ignore[arg-type]
        for form in ("projected", "diagonal", "both")
    ]
    np.testing.assert_allclose(tables[2] ** 2, tables[0] * tables[1], rtol=1e-9)


def test_more_images_than_there_are_give_all_of_them(vit: Case) -> None:
    all_of_them = MeasuredHarm(images=6)(evidence_of(vit), CHOICES[:2]).table.cost
    more = MeasuredHarm(images=10**6)(evidence_of(vit), CHOICES[:2]).table.cost
    assert np.array_equal(all_of_them, more)


@metrics
def test_costs_are_the_same_every_time(vit: Case, metric: OutputFisher) -> None:
    first = metric(evidence_of(vit), CHOICES[:2]).table.cost
    torch.rand(1)
    assert np.array_equal(first, metric(evidence_of(vit), CHOICES[:2]).table.cost)
