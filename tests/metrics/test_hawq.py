from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import Case
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from lampq.data import Samples
from lampq.errors import DataError
from lampq.methods import METHODS, FitCache, LinearView, SiteWidths
from lampq.methods.base import layer_output
from lampq.metrics.base import Evidence
from lampq.metrics.fisher import fisher_traces
from lampq.metrics.hawq import Hawq, hutchinson_traces, input_change, positive, weight_change
from lampq.types import LayerBits, LayerRole, LayerSpec

CHOICES = tuple(LayerBits(b, b) for b in (2, 3, 4))


class Tiny(nn.Module):
    """Two layers and a smooth nonlinearity between."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.tanh(self.fc1(x.flatten(1))))


LAYERS = (
    LayerSpec("fc1", LayerRole.FC1, -1, 20),
    LayerSpec("fc2", LayerRole.FC2, -1, 15),
)


@pytest.fixture(scope="module")
def tiny() -> tuple[nn.Module, Samples]:
    """A model whose whole Hessian can be written down, in double precision."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Tiny().double()
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(12, 1, 2, 2, generator=generator, dtype=torch.float64)
    return model, Samples(images, torch.randint(3, (12,), generator=generator))


def exact_trace(model: nn.Module, samples: Samples, name: str) -> float:
    """Trace of the Hessian of the mean loss, from all of its entries."""
    weight = model.get_parameter(f"{name}.weight").detach()

    def loss(flat: Tensor) -> Tensor:
        values = {f"{name}.weight": flat.view_as(weight)}
        return F.cross_entropy(functional_call(model, values, (samples.images,)), samples.labels)

    hessian = torch.autograd.functional.hessian(loss, weight.flatten())
    return float(hessian.trace())


def test_the_hutchinson_estimate_is_the_exact_trace_in_the_mean(
    tiny: tuple[nn.Module, Samples],
) -> None:
    model, samples = tiny
    found = hutchinson_traces(model, LAYERS, samples, labels="data", draws=1500, batch=12)
    for layer in LAYERS:
        assert found[layer.name] == pytest.approx(exact_trace(model, samples, layer.name), rel=0.1)


def test_one_draw_of_the_estimate_is_v_h_v() -> None:
    # where a layer has one weight, v is plus or minus one and the estimate is exact
    model = nn.Sequential(nn.Flatten(), nn.Linear(1, 1, bias=False), nn.Linear(1, 2)).double()
    images = torch.linspace(-1, 1, 6, dtype=torch.float64).view(6, 1, 1, 1)
    samples = Samples(images, torch.tensor([0, 1, 0, 1, 1, 0]))
    layer = LayerSpec("1", LayerRole.FC1, -1, 1)
    found = hutchinson_traces(model, (layer,), samples, labels="data", draws=1)
    assert found["1"] == pytest.approx(exact_trace(model, samples, "1"), rel=1e-10)


def test_the_estimate_is_seeded(vit: Case) -> None:
    layers = vit.graph.allocatable
    first, again, other = (
        hutchinson_traces(vit.model, layers, vit.samples, draws=2, seed=s) for s in (0, 0, 1)
    )
    assert first == again
    assert first != other
    assert list(first) == [layer.name for layer in layers]


def test_the_estimate_works_on_both_families_and_leaves_the_model_alone(case: Case) -> None:
    before = copy.deepcopy(case.model.state_dict())
    found = hutchinson_traces(case.model, case.graph.allocatable, case.samples, draws=1)
    assert all(np.isfinite(value) for value in found.values())
    assert all(torch.equal(case.model.state_dict()[k], v) for k, v in before.items())
    assert not any(parameter.requires_grad for parameter in case.model.parameters())


def test_data_labels_that_are_missing_are_an_error(vit: Case) -> None:
    samples = replace(vit.samples, labels=None)
    with pytest.raises(DataError, match="needs labels"):
        hutchinson_traces(vit.model, vit.graph.allocatable, samples, labels="data")


def evidence_of(case: Case, method: str = "minmax") -> Evidence:
    sites = SiteWidths(LayerBits(8, 8), 4)
    fits = FitCache(case.model, case.graph, METHODS.get(method)(), case.stats, sites)
    return Evidence(case.model, case.graph, fits, case.samples, seed=0)


def test_the_cost_is_mean_trace_times_squared_change(case: Case) -> None:
    evidence = evidence_of(case)
    found = Hawq()(evidence, CHOICES)
    traces = fisher_traces(case.model, case.graph.allocatable, case.samples)
    for row, layer in enumerate(case.graph.allocatable):
        weight = case.model.get_submodule(layer.name).weight
        for column, bits in enumerate(CHOICES):
            change = evidence.fits.layer(layer.name, bits).weight - weight
            expected = traces[layer.name] / layer.n_params * float(change.square().sum())
            assert found.table.cost[row, column] == pytest.approx(expected, rel=1e-4)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_hutchinson_takes_the_place_of_the_fisher_trace(vit: Case) -> None:
    evidence = evidence_of(vit)
    fisher, hutchinson = (
        Hawq(hessian=h)(evidence_of(vit), CHOICES).table.cost  # type: ignore[arg-type]
        for h in ("fisher", "hutchinson")
    )
    traces = positive(
        hutchinson_traces(vit.model, vit.graph.allocatable, evidence.samples, draws=16)
    )
    names = [layer.name for layer in vit.graph.allocatable]
    fishers = fisher_traces(vit.model, vit.graph.allocatable, evidence.samples)
    ratio = np.array([traces[name] / fishers[name] for name in names])
    np.testing.assert_allclose(hutchinson / fisher, ratio[:, None].repeat(3, axis=1), rtol=1e-5)


@pytest.mark.parametrize("layer", ["blocks.0.attn.qkv", "blocks.0.mlp.fc1"])
def test_changes_of_folded_layers_are_in_float_coordinates(vit: Case, layer: str) -> None:
    evidence = evidence_of(vit, "repq")
    fit = evidence.fits.layer(layer, LayerBits(8, 8))
    assert fit.fold is not None
    assert not torch.allclose(fit.fold.ratio, torch.ones_like(fit.fold.ratio), atol=0.05)
    view = LinearView.of(vit.model, vit.graph.layer(layer))
    # at eight bits little is left of the change; unfolded wrongly it would be of the weight's size
    assert weight_change(fit, view.weight) < 1e-3 * float(view.weight.square().sum())
    inputs = evidence.fits.inputs(layer)
    assert input_change(fit, evidence.fits.stats(layer)) < 1e-2 * float(inputs.square().mean())
    exact = inputs @ view.weight.T + view.bias
    assert float((layer_output(fit, inputs) - exact).norm() / exact.norm()) < 0.1


def test_with_joint_widths_the_input_plays_no_part(vit: Case) -> None:
    equal = Hawq()(evidence_of(vit), CHOICES).table.cost
    wide = Hawq()(evidence_of(vit), tuple(LayerBits(b, 8) for b in (2, 3, 4))).table.cost
    np.testing.assert_allclose(equal, wide, rtol=1e-5)


def test_with_separate_widths_the_change_of_the_input_is_added(vit: Case) -> None:
    pairs = tuple(LayerBits(w, a) for w in (2, 4) for a in (2, 8))
    evidence = evidence_of(vit)
    found = Hawq()(evidence, pairs)
    alone = Hawq()(evidence_of(vit), CHOICES).table.cost
    layer = vit.graph.allocatable[1]
    inputs = evidence.fits.inputs(layer.name)
    fit = evidence.fits.layer(layer.name, pairs[0])
    assert fit.input_quantizer is not None
    change = float((fit.input_quantizer(inputs) - inputs).square().mean())
    expected = alone[1, 0] + found.details["input_trace"][layer.name] * change
    assert found.table.cost[1, 0] == pytest.approx(expected, rel=1e-4)
    assert (found.table.cost[:, 0] > found.table.cost[:, 1]).all()


def test_the_input_trace_is_the_mean_square_of_the_input_gradient(vit: Case) -> None:
    model = copy.deepcopy(vit.model)
    pairs = tuple(LayerBits(2, a) for a in (2, 8))
    metric = Hawq(labels="data")
    found = metric(evidence_of(vit), pairs).details["input_trace"]
    name = "blocks.1.mlp.fc2"
    seen: list[Tensor] = []

    def keep(_module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(arguments[0].detach().requires_grad_())
        return (seen[-1],)

    model.get_submodule(name).register_forward_pre_hook(keep)
    total = 0.0
    labels = vit.samples.require_labels("a test")
    for image, label in zip(vit.samples.images, labels, strict=True):
        loss = F.cross_entropy(model(image[None]), label[None])
        (slope,) = torch.autograd.grad(loss, seen[-1])
        total += float(slope.square().sum())
    assert found[name] == pytest.approx(total / len(labels), rel=1e-3)


def test_traces_that_are_not_positive_are_raised_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="2 of 3 layers is not positive, that of 'b' among them"):
        assert positive({"a": 2.0, "b": -1.0, "c": 0.0}) == {"a": 2.0, "b": 2.0, "c": 2.0}


def test_if_no_trace_is_positive_all_are_one() -> None:
    with pytest.warns(UserWarning, match="not positive"):
        assert positive({"a": -2.0}) == {"a": 1.0}


def test_positive_traces_are_left_alone() -> None:
    assert positive({"a": 2.0, "b": 1e-9}) == {"a": 2.0, "b": 1e-9}
