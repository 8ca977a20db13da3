from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from conftest import Case, same_fit, same_quantizer

from lampq.calibrate import LayerStats, MatmulStats
from lampq.errors import GraphError
from lampq.methods import METHODS
from lampq.methods.base import FitCache, LinearView, SiteWidths, layer_output
from lampq.methods.minmax import MinMax
from lampq.progress import Progress
from lampq.quant.half import halved, is_half
from lampq.quant.modules import LayerFit, MatmulFit, SiteFit, assemble, quantized_layer
from lampq.types import BitPlan, LayerBits, LayerSpec, MatmulSpec, SumSpec

SITES = SiteWidths(LayerBits(8, 8), None)


@dataclass(frozen=True)
class Counting:
    """MinMax that writes down what it is asked for."""

    name: ClassVar[str] = "counting"
    asked: list[tuple[str, str]] = field(default_factory=list)

    def fit(self, layer: LinearView, bits: LayerBits, stats: LayerStats) -> LayerFit:
        self.asked.append((layer.spec.name, str(bits)))
        return MinMax().fit(layer, bits, stats)

    def fit_matmul(
        self, site: MatmulSpec, left_bits: int, right_bits: int, stats: MatmulStats
    ) -> MatmulFit:
        self.asked.append((site.name, f"{left_bits}/{right_bits}"))
        return MinMax().fit_matmul(site, left_bits, right_bits, stats)


@dataclass(frozen=True)
class Drawer:
    """A store in memory."""

    kept: dict[tuple[str, LayerBits], LayerFit] = field(default_factory=dict)
    sites: dict[tuple[str, tuple[int, ...]], SiteFit] = field(default_factory=dict)

    def load(self, spec: LayerSpec, bits: LayerBits) -> LayerFit | None:
        return self.kept.get((spec.name, bits))

    def save(self, fit: LayerFit) -> None:
        self.kept[fit.spec.name, fit.bits] = fit

    def load_site(self, spec: MatmulSpec | SumSpec, widths: tuple[int, ...]) -> SiteFit | None:
        return self.sites.get((spec.name, widths))

    def save_site(self, fit: SiteFit, widths: tuple[int, ...]) -> None:
        self.sites[fit.spec.name, widths] = fit


def _mixed(case: Case, *, shift: int) -> BitPlan:
    """A plan with a different width for neighbouring layers."""
    widths = [LayerBits(2 + (i + shift) % 4, 2 + (i + shift) % 3) for i in range(99)]
    layers = case.graph.allocatable
    return BitPlan(layers, tuple(widths[: len(layers)]))


def test_a_view_of_a_convolution_is_a_matrix(vit: Case) -> None:
    view = LinearView.of(vit.model, vit.graph.layer("patch_embed.proj"))
    assert view.weight.shape == (24, 3 * 8 * 8)


def test_a_view_of_a_layer_without_bias_has_a_bias_of_zero(swin: Case) -> None:
    view = LinearView.of(swin.model, swin.graph.layer("layers.1.downsample.reduction"))
    assert torch.equal(view.bias, torch.zeros(32))


@pytest.mark.parametrize("kind", ["qk", "av"])
def test_matmul_widths_can_be_fixed(vit: Case, kind: str) -> None:
    plan = BitPlan.uniform(vit.graph.allocatable, LayerBits(2, 3))
    site = MatmulSpec(f"blocks.0.attn.{kind}", kind, 0)  # type: ignore[arg-type]
    assert SiteWidths(LayerBits(8, 8), 6).of_matmul(site, plan) == (6, 6)


def test_matmul_widths_follow_the_layers_of_their_own_block(vit: Case) -> None:
    plan = BitPlan.uniform(vit.graph.allocatable, LayerBits(8, 8))
    plan = plan.with_bits("blocks.1.attn.qkv", LayerBits(8, 3))
    plan = plan.with_bits("blocks.1.attn.proj", LayerBits(8, 5))
    widths = {site.name: SITES.of_matmul(site, plan) for site in vit.graph.matmuls}
    assert widths == {
        "blocks.0.attn.qk": (8, 8),
        "blocks.0.attn.av": (8, 8),
        "blocks.1.attn.qk": (3, 3),
        "blocks.1.attn.av": (5, 3),
    }


def test_each_fit_is_computed_once(vit: Case) -> None:
    method = Counting()
    fits = FitCache(vit.model, vit.graph, method, vit.stats, SITES)
    for shift in (0, 1, 0):
        fits.of_plan(_mixed(vit, shift=shift))
    assert len(method.asked) == len(set(method.asked))


def test_an_exchange_between_two_layers_costs_two_fits(vit: Case) -> None:
    method = Counting()
    sites = SiteWidths(LayerBits(8, 8), 8)
    fits = FitCache(vit.model, vit.graph, method, vit.stats, sites)
    plan = BitPlan.uniform(vit.graph.allocatable, LayerBits(4, 4))
    fits.of_plan(plan)
    method.asked.clear()
    plan = plan.with_bits("blocks.0.mlp.fc1", LayerBits(5, 5))
    fits.of_plan(plan.with_bits("blocks.1.mlp.fc2", LayerBits(3, 3)))
    assert method.asked == [("blocks.0.mlp.fc1", "5/5"), ("blocks.1.mlp.fc2", "3/3")]


def test_a_plan_is_fitted_at_its_widths_and_the_rest_at_the_edge_widths(case: Case) -> None:
    fits = FitCache(case.model, case.graph, MinMax(), case.stats, SITES)
    plan = _mixed(case, shift=0)
    layers, matmuls = fits.of_plan(plan)
    assert [fit.spec for fit in layers] == list(case.graph.layers)
    assert [fit.spec for fit in matmuls] == list(case.graph.matmuls)
    assert all(fit.bits == plan.get(fit.spec.name, LayerBits(8, 8)) for fit in layers)


@pytest.mark.parametrize("method", list(METHODS))
def test_a_layer_fitted_alone_equals_the_one_fitted_inside_any_plan(vit: Case, method: str) -> None:
    name, bits = "blocks.1.mlp.fc2", LayerBits(3, 4)
    spec = vit.graph.layer(name)
    factory = METHODS.get(method)
    alone = factory().fit(LinearView.of(vit.model, spec), bits, vit.stats[name])
    fits = FitCache(vit.model, vit.graph, factory(), vit.stats, SITES)
    layers, _ = fits.of_plan(_mixed(vit, shift=1).with_bits(name, bits))
    inside = next(fit for fit in layers if fit.spec == spec)
    assert same_fit(alone, inside)


@pytest.mark.parametrize("method", list(METHODS))
def test_a_product_fitted_alone_equals_the_one_fitted_inside_a_plan(vit: Case, method: str) -> None:
    site = vit.graph.matmuls[1]
    factory = METHODS.get(method)
    alone = factory().fit_matmul(site, 4, 4, vit.stats[site.name])
    fits = FitCache(vit.model, vit.graph, factory(), vit.stats, SiteWidths(LayerBits(8, 8), 4))
    inside = fits.of_plan(_mixed(vit, shift=0))[1][1]
    assert inside.spec == site
    assert same_quantizer(alone.left, inside.left)
    assert same_quantizer(alone.right, inside.right)


def test_a_stored_fit_is_not_computed_again(vit: Case) -> None:
    drawer, bits = Drawer(), LayerBits(3, 3)
    first = FitCache(vit.model, vit.graph, MinMax(), vit.stats, SITES, store=drawer)
    kept = first.layer("head", bits)
    method = Counting()
    second = FitCache(vit.model, vit.graph, method, vit.stats, SITES, store=drawer)
    assert second.layer("head", bits) is kept
    assert method.asked == []


def test_an_unknown_layer_is_named(vit: Case) -> None:
    fits = FitCache(vit.model, vit.graph, MinMax(), vit.stats, SITES)
    with pytest.raises(GraphError, match="'tail'"):
        fits.layer("tail", LayerBits(4, 4))


def test_the_error_is_the_squared_output_error_over_the_squared_output(vit: Case) -> None:
    fits = FitCache(vit.model, vit.graph, MinMax(), vit.stats, SITES)
    name, bits = "blocks.0.mlp.fc1", LayerBits(3, 3)
    module = vit.model.get_submodule(name)
    exact = module(fits.inputs(name))
    got = quantized_layer(fits.layer(name, bits), module)(fits.inputs(name))
    expected = (got - exact).square().sum() / (exact - module.bias).square().sum()
    assert fits.error(name, bits) == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("layer", ["attn.qkv", "attn.proj", "mlp.fc2"])
def test_the_output_of_a_fit_is_that_of_its_layer_behind_its_folded_norm(
    vit: Case, method: str, layer: str
) -> None:
    spec = vit.graph.layer(f"blocks.0.{layer}")
    stats = vit.stats[spec.name]
    fit = METHODS.get(method)().fit(LinearView.of(vit.model, spec), LayerBits(4, 4), stats)
    inputs = stats.inputs if fit.fold is None else fit.fold.of_inputs(stats.inputs)
    module = quantized_layer(fit, vit.model.get_submodule(spec.name))
    torch.testing.assert_close(layer_output(fit, stats.inputs), module(inputs))


def test_an_assembled_model_is_as_stored_and_leaves_the_fits_alone(vit: Case) -> None:
    plan = BitPlan.uniform(vit.graph.allocatable, LayerBits(3, 3))
    sites = SiteWidths(LayerBits(8, 8), 4, rest=16)
    fits = FitCache(vit.model, vit.graph, METHODS.get("minmax")(), vit.stats, sites)
    before = [copy.deepcopy(fit) for fit in fits.of_plan(plan)[0]]
    model = fits.assembled(plan)
    assert all(map(same_fit, before, fits.of_plan(plan)[0]))
    expected = halved(assemble(vit.model, *fits.of_plan(plan))).state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())
    whole = fits.at(SITES, Progress()).assembled(plan)
    assert not is_half(whole.get_submodule("norm").weight)
