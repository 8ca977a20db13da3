from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import Case
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from lampq.config import make_config
from lampq.data import Samples
from lampq.errors import DataError
from lampq.evaluate import PrefixCache
from lampq.methods import METHODS, FitCache, SiteWidths
from lampq.metrics.base import Evidence
from lampq.metrics.fisher import (
    TypeAwareFisher,
    _probe_bits,
    fisher_traces,
    gradients,
    per_image_square,
    probe_layers,
    quantized_trace,
    role_scales,
    sampled_blocks,
)
from lampq.passes import drawn_labels
from lampq.quant.modules import assemble
from lampq.types import LayerBits, LayerRole

ROLES = (LayerRole.QKV, LayerRole.PROJ, LayerRole.FC1, LayerRole.FC2)
CHOICES = tuple(LayerBits(b, b) for b in (2, 3, 4))


def doubled(case: Case) -> Case:
    """The case in double precision."""
    samples = replace(case.samples, images=case.samples.images.double())
    return replace(case, model=copy.deepcopy(case.model).double(), samples=samples)


def evidence_of(case: Case, method: str = "minmax", samples: Samples | None = None) -> Evidence:
    fits = FitCache(
        case.model, case.graph, METHODS.get(method)(), case.stats, SiteWidths(LayerBits(8, 8), 4)
    )
    return Evidence(case.model, case.graph, fits, samples or case.samples, seed=0)


def weight_gradients(case: Case, names: list[str], answers: torch.Tensor) -> list[dict[str, float]]:
    """Squared norm of each weight's gradient, image by image, by plain differentiation."""
    model = copy.deepcopy(case.model)
    weights = [model.get_submodule(name).weight.requires_grad_(True) for name in names]
    found = []
    for image, answer in zip(case.samples.images, answers, strict=True):
        loss = F.cross_entropy(model(image[None]), answer[None])
        grads = torch.autograd.grad(loss, weights)
        found.append({n: float(g.square().sum()) for n, g in zip(names, grads, strict=True)})
    return found


def test_traces_equal_a_loop_over_images(case: Case) -> None:
    case = doubled(case)
    names = [layer.name for layer in case.graph.allocatable]
    labels = case.samples.require_labels("a test")
    one_by_one = weight_gradients(case, names, labels)
    found = fisher_traces(case.model, case.graph.allocatable, case.samples, labels="data")
    assert list(found) == names
    for name in names:
        expected = sum(image[name] for image in one_by_one) / len(one_by_one)
        assert expected > 0
        assert found[name] == pytest.approx(expected, rel=1e-10)


def test_traces_with_drawn_labels_equal_a_loop_over_images(case: Case) -> None:
    case = doubled(case)
    names = [layer.name for layer in case.graph.allocatable]
    with torch.no_grad():
        logits = case.model(case.samples.images)
    answers = drawn_labels(logits, torch.Generator().manual_seed(5))
    one_by_one = weight_gradients(case, names, answers)
    found = fisher_traces(case.model, case.graph.allocatable, case.samples, seed=5)
    for name in names:
        expected = sum(image[name] for image in one_by_one) / len(one_by_one)
        assert found[name] == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("labels", ["data", "model"])
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_traces_do_not_depend_on_the_batch(case: Case, labels: str, batch: int) -> None:
    case = doubled(case)
    whole, parts = (
        fisher_traces(
            case.model,
            case.graph.allocatable,
            case.samples,
            labels=labels,
            seed=1,
            batch=size,  # type: ignore[arg-type]
        )
        for size in (6, batch)
    )
    assert parts == pytest.approx(whole, rel=1e-10)


def test_the_trace_is_not_the_square_of_the_mean_gradient(vit: Case) -> None:
    case = doubled(vit)
    names = [layer.name for layer in case.graph.allocatable]
    model = copy.deepcopy(case.model)
    weights = [model.get_submodule(name).weight.requires_grad_(True) for name in names]
    loss = F.cross_entropy(model(case.samples.images), case.samples.labels)
    grads = torch.autograd.grad(loss, weights)
    found = fisher_traces(case.model, case.graph.allocatable, case.samples, labels="data")
    for name, grad in zip(names, grads, strict=True):
        # Jensen: the mean of squares is at least the square of the mean
        assert float(grad.square().sum()) < found[name]


def test_gradients_of_orthogonal_images_square_to_a_share_of_the_trace() -> None:
    # n images whose weight gradients do not overlap: the squared mean gradient is the trace / n
    images, tokens, channels = 4, 3, 8
    x = torch.zeros(images, tokens, channels, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for i in range(images):
        x[i, :, 2 * i : 2 * i + 2] = torch.randn(tokens, 2, generator=generator).double()
    g = torch.randn(images, tokens, 5, generator=generator).double()
    mean = torch.einsum("bto,btc->oc", g, x) / images
    trace = float(per_image_square(x, g, images).mean())
    assert float(mean.square().sum()) == pytest.approx(trace / images, rel=1e-12)


@given(
    images=st.integers(1, 4),
    tokens=st.integers(1, 12),
    channels=st.integers(1, 12),
    outputs=st.integers(1, 12),
)
def test_both_forms_of_the_square_agree_with_the_definition(
    images: int, tokens: int, channels: int, outputs: int
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(images, tokens, channels, generator=generator).double()
    g = torch.randn(images, tokens, outputs, generator=generator).double()
    expected = torch.stack([(g[i].T @ x[i]).square().sum() for i in range(images)])
    torch.testing.assert_close(per_image_square(x, g, images), expected, rtol=1e-11, atol=0)


@pytest.mark.parametrize("tokens", [2, 40], ids=["few-tokens", "many-tokens"])
def test_windows_of_one_image_are_joined_before_squaring(tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, tokens, 8, generator=generator).double()  # two images of three windows
    g = torch.randn(6, tokens, 8, generator=generator).double()
    joined = [torch.einsum("wto,wtc->oc", g[i : i + 3], x[i : i + 3]) for i in (0, 3)]
    expected = torch.stack([grad.square().sum() for grad in joined])
    torch.testing.assert_close(per_image_square(x, g, 2), expected, rtol=1e-11, atol=0)


def test_drawn_labels_follow_the_distribution_of_the_model() -> None:
    logits = torch.tensor([0.1, 0.6, 0.3]).log().expand(20_000, 3)
    labels = drawn_labels(logits, torch.Generator().manual_seed(0))
    shares = labels.bincount(minlength=3) / 20_000
    # six standard deviations of a share are about 0.02
    torch.testing.assert_close(shares, torch.tensor([0.1, 0.6, 0.3]), atol=0.021, rtol=0)


def test_drawn_labels_depend_on_the_seed_only(vit: Case) -> None:
    draws = []
    for seed in (3, 3, 4):
        torch.rand(1)
        found = fisher_traces(vit.model, vit.graph.allocatable, vit.samples, seed=seed)
        draws.append(found)
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]


def test_data_labels_that_are_missing_are_an_error(vit: Case) -> None:
    samples = replace(vit.samples, labels=None)
    with pytest.raises(DataError, match="labels='data' needs labels"):
        fisher_traces(vit.model, vit.graph.allocatable, samples, labels="data")


def test_gradients_of_a_batch_are_gone_when_the_next_is_asked_for(vit: Case) -> None:
    names = [vit.graph.allocatable[0].name]
    steps = gradients(vit.model, names, vit.samples, "model", seed=0, batch=2)
    _, first = next(steps)
    assert list(first) == names
    _, second = next(steps)
    assert (list(first), list(second)) == ([], names)


def test_gradients_leave_no_hooks_when_given_up(vit: Case) -> None:
    model = copy.deepcopy(vit.model)
    names = [layer.name for layer in vit.graph.allocatable]
    steps = gradients(model, names, vit.samples, "model", seed=0, batch=2)
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("name", ["blocks.0.attn.qkv", "blocks.1.attn.proj", "blocks.0.mlp.fc2"])
def test_the_trace_of_a_quantized_layer_is_that_of_its_decoded_weight(vit: Case, name: str) -> None:
    case = doubled(vit)
    fits = FitCache(
        case.model,
        case.graph,
        METHODS.get("minmax")(),
        {k: v for k, v in vit.stats.items() if k == name},
        SiteWidths(LayerBits(8, 8), 4),
    )
    single = fits.layer(name, LayerBits(3, 3))
    fit = replace(
        single,
        bias=single.bias.double(),
        weight_quantizer=copy.deepcopy(single.weight_quantizer).double(),
        input_quantizer=copy.deepcopy(single.input_quantizer).double(),
    )
    quantized = assemble(case.model, [fit])
    layer = quantized.get_submodule(name)
    layer.weight = layer.weight.detach().requires_grad_(True)
    squares = []
    for image, label in zip(case.samples.images, case.samples.labels, strict=True):
        loss = F.cross_entropy(quantized(image[None]), label[None])
        (grad,) = torch.autograd.grad(loss, layer.weight)
        squares.append(float(grad.square().sum()))
    cache = PrefixCache(case.model, case.graph.blocks, case.samples, batch=4)
    found = quantized_trace(case.model, fit, cache, "data", 0)
    assert found == pytest.approx(sum(squares) / len(squares), rel=1e-10)


def test_the_trace_of_a_layer_quantized_finely_is_near_that_of_the_float_layer(case: Case) -> None:
    evidence = evidence_of(case)
    float_traces = fisher_traces(case.model, case.graph.allocatable, case.samples, labels="data")
    cache = PrefixCache(case.model, case.graph.blocks, case.samples)
    for layer in case.graph.allocatable[:4]:
        fit = evidence.fits.layer(layer.name, LayerBits(8, 8))
        found = quantized_trace(case.model, fit, cache, "data", 0)
        assert found == pytest.approx(float_traces[layer.name], rel=0.2)


@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("blocks", [1, 2, 12, 24])
def test_sampled_blocks_are_a_share_of_the_blocks(blocks: int, share: float) -> None:
    found = sampled_blocks(blocks, share, seed=7)
    assert len(found) == max(1, round(share * blocks))
    assert list(found) == sorted(set(found))
    assert set(found) <= set(range(blocks))


def test_sampled_blocks_depend_on_the_seed_only() -> None:
    torch.rand(3)
    assert sampled_blocks(24, 0.5, 1) == sampled_blocks(24, 0.5, 1)
    assert len({sampled_blocks(24, 0.5, seed) for seed in range(20)}) > 15


def scales(drops: tuple[float, ...], traces: tuple[float, ...] = (1.0,) * 4) -> list[float]:
    found = role_scales(
        dict(zip(ROLES, drops, strict=True)),
        dict(zip(ROLES, traces, strict=True)),
        resolution=0.1,
    )
    return [found[role] for role in ROLES]


def test_a_role_scale_is_the_drop_per_trace() -> None:
    found = scales((8.0, 6.0, 4.0, 1.0), (2.0, 3.0, 0.5, 10.0))
    assert found == pytest.approx([4.0, 2.0, 8.0, 0.1])


@pytest.mark.parametrize("drop", [0.0, -0.07, -5.0], ids=["zero", "little-negative", "negative"])
def test_a_drop_that_cannot_be_told_is_raised_to_the_resolution(drop: float) -> None:
    with pytest.warns(UserWarning, match=r"probes of proj hurt less .* raised to 0\.1"):
        found = scales((8.0, drop, 4.0, 1.0))
    assert found == pytest.approx([8.0, 0.1, 4.0, 1.0])


def test_a_drop_is_at_least_a_hundredth_of_the_largest() -> None:
    with pytest.warns(UserWarning, match=r"raised to 0\.5"):
        found = scales((50.0, 0.2, 4.0, 1.0))
    assert found == pytest.approx([50.0, 0.5, 4.0, 1.0])


@pytest.mark.parametrize(
    "drops", [(0.0,) * 4, (-1.0, -2.0, 0.0, -3.0), (0.1, 0.05, 0.0, 0.0)], ids=str
)
def test_drops_that_are_all_nothing_give_ones_with_a_warning(drops: tuple[float, ...]) -> None:
    with pytest.warns(UserWarning, match="no probe hurts"):
        assert scales(drops, (5.0, 6.0, 7.0, 8.0)) == [1.0] * 4


@pytest.mark.filterwarnings("ignore:the probes of", "ignore:no probe hurts")
@given(
    drops=st.tuples(*[st.floats(-100, 100)] * 4),
    traces=st.tuples(*[st.floats(0, 1e6)] * 4),
)
def test_a_role_scale_is_always_positive_and_finite(
    drops: tuple[float, ...], traces: tuple[float, ...]
) -> None:
    assert all(0 < scale < math.inf for scale in scales(drops, traces))


@pytest.mark.filterwarnings("ignore:the probes of", "ignore:no probe hurts")
@pytest.mark.parametrize("signal", ["accuracy", "loss", "kl"])
@pytest.mark.parametrize("trace", ["fp", "quantized"])
def test_the_metric_gives_positive_costs_that_fall_by_the_penalty(
    case: Case, signal: str, trace: str
) -> None:
    metric = TypeAwareFisher(penalty=5.0, alpha_signal=signal, alpha_trace=trace)  # type: ignore[arg-type]
    cost = metric(evidence_of(case), CHOICES).table.cost
    assert (cost > 0).all()
    assert cost[:, 0] / cost[:, 1] == pytest.approx(5.0)
    assert cost[:, 1] / cost[:, 2] == pytest.approx(5.0)


def test_the_metric_multiplies_trace_and_role_scale(vit: Case) -> None:
    found = TypeAwareFisher(alpha_signal="kl")(evidence_of(vit), CHOICES)
    traces, scale = found.details["fisher_trace"], found.details["role_scale"]
    for layer, row in zip(found.table.layers, found.table.cost, strict=True):
        expected = scale[layer.role.value] * traces[layer.name] * 4.0**-2
        assert row[0] == pytest.approx(expected, rel=1e-12)


def test_with_the_float_trace_the_mean_sensitivity_of_a_probed_role_is_its_drop(vit: Case) -> None:
    metric = TypeAwareFisher(alpha_signal="kl", alpha_trace="fp", probe_blocks=1.0)
    found = metric(evidence_of(vit), CHOICES)
    drops = found.details["probe"]["drop"]
    for role in ROLES:
        rows = [i for i, layer in enumerate(found.table.layers) if layer.role is role]
        omega = found.table.cost[rows, 0].mean() * 4.0**2
        names = [found.table.layers[i].name for i in rows]
        assert omega == pytest.approx(sum(drops[name] for name in names) / len(names), rel=1e-9)


def test_a_metric_without_role_scales_is_the_bare_trace(vit: Case) -> None:
    found = TypeAwareFisher(penalty=2.0, type_aware=False)(evidence_of(vit), CHOICES)
    traces = fisher_traces(vit.model, vit.graph.allocatable, vit.samples, seed=0)
    expected = [traces[layer.name] / 4 for layer in found.table.layers]
    assert found.table.cost[:, 0] == pytest.approx(expected, rel=1e-9)


def test_a_probe_quantizes_one_layer_and_nothing_else(case: Case) -> None:
    evidence = evidence_of(case)
    layers = list(case.graph.allocatable)
    bits = LayerBits(2, 2)
    probes = probe_layers(evidence, layers, bits, 100)
    labels = case.samples.require_labels("a test")
    with torch.no_grad():
        reference = case.model(case.samples.images)
        for layer in layers:
            model = assemble(case.model, [evidence.fits.layer(layer.name, bits)])
            logits = model(case.samples.images)
            quality = probes.quality[layer.name]
            expected = -float(F.cross_entropy(logits.double(), labels))
            assert quality.likelihood == pytest.approx(expected, rel=1e-5)
    expected = -float(F.cross_entropy(reference.double(), labels))
    assert probes.base.likelihood == pytest.approx(expected, rel=1e-5)
    assert probes.base.agreement == pytest.approx(0.0, abs=1e-6)


@pytest.mark.filterwarnings("ignore:the probes of", "ignore:no probe hurts")
def test_samples_without_labels_do_for_the_metric(vit: Case) -> None:
    samples = replace(vit.samples, labels=None)
    found = TypeAwareFisher()(evidence_of(vit, samples=samples), CHOICES)
    assert (found.table.cost > 0).all()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"bits": 4}, "2/2"),
        ({"bits": 4, "act_bits": 8}, "2/6"),
        ({"bits": 4, "act_bits": 2}, "2/1"),
        ({"bits": 4, "act_bits": 8, "preset": "paper"}, "2/6"),
    ],
    ids=str,
)
def test_probes_keep_the_distance_of_input_and_weight(
    options: dict[str, Any], expected: str
) -> None:
    # the widest choice of the second case is 8/10: its distance is cut off
    assert str(_probe_bits(2, make_config(options).widths)) == expected
