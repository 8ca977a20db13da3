from __future__ import annotations

import pytest
import torch
from conftest import Case
from torch import Tensor
from torch.nn import functional as F

from lampq.calibrate import LayerStats, MatmulStats
from lampq.methods.adalog import AdaLog
from lampq.methods.adalog_layer import GELU_MINIMUM, STEPS, LayerSearch
from lampq.methods.base import FitCache, LinearView, SiteWidths, layer_output
from lampq.methods.minmax import MinMax, per_tensor
from lampq.quant.base import Quantizer
from lampq.quant.log import LogQuantizer
from lampq.quant.uniform import UniformQuantizer
from lampq.types import LayerBits, LayerRole, LayerSpec, MatmulSpec

FC2 = LayerSpec("blocks.0.mlp.fc2", LayerRole.FC2, 0, 0)
PROJ = LayerSpec("blocks.0.attn.proj", LayerRole.PROJ, 0, 0)


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _view(spec: LayerSpec) -> LinearView:
    return LinearView(spec, _normal(1, 10, 16) / 4, _normal(2, 10))


@pytest.fixture(scope="module")
def fits(vit: Case) -> FitCache:
    sites = SiteWidths(LayerBits(8, 8), None)
    return FitCache(vit.model, vit.graph, AdaLog(), vit.stats, sites)


@pytest.mark.parametrize("layer", ["attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"])
def test_the_error_falls_when_bits_rise(fits: FitCache, layer: str) -> None:
    errors = [fits.error(f"blocks.0.{layer}", LayerBits(bits, bits)) for bits in (2, 4, 8)]
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize("layer", ["attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"])
def test_four_bits_are_better_searched_than_between_the_extremes(
    vit: Case, fits: FitCache, layer: str
) -> None:
    plain = FitCache(vit.model, vit.graph, MinMax(), vit.stats, fits.sites)
    name, bits = f"blocks.0.{layer}", LayerBits(4, 4)
    assert fits.error(name, bits) < plain.error(name, bits)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_the_gram_form_of_the_output_error_equals_the_error_itself(bits: int) -> None:
    weight, inputs = _normal(1, 10, 16).double(), _normal(3, 200, 16).double()
    problem = LayerSearch(AdaLog(), weight, inputs, LayerBits(bits, bits))
    problem.input_quantizer = per_tensor(inputs, bits)
    quantized = problem.input_quantizer(inputs)
    gram, cross = problem.gram()
    for scale, zero in ((0.3, 1.0), (0.1, 2.0), (0.05, 0.0)):
        grid = UniformQuantizer(bits, torch.full((10, 1), scale).double(), torch.tensor(zero))
        e = grid(weight) - weight
        form = (e @ gram * e).sum(1) + 2 * (e * cross).sum(1)
        constant = ((quantized - inputs) @ weight.T).square().sum(0)
        direct = (quantized @ grid(weight).T - inputs @ weight.T).square().sum(0)
        torch.testing.assert_close(form + constant, direct)


def test_searching_the_weight_on_the_output_is_no_worse_than_the_full_range() -> None:
    weight, inputs = _normal(1, 10, 16), _normal(3, 200, 16) @ _normal(4, 16, 16)
    problem = LayerSearch(AdaLog(), weight, inputs, LayerBits(3, 8))
    problem.search_weight()
    full = UniformQuantizer.between(
        3, weight.amin(1, keepdim=True), weight.amax(1, keepdim=True), whole=True
    )
    found, widest = (
        (inputs @ (grid(weight) - weight).T).square().sum(0)
        for grid in (problem.weight_quantizer, full)
    )
    assert float(found.sum()) < float(widest.sum())


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_the_weight_grid_found_has_the_least_output_error_behind_a_coarse_input(bits: int) -> None:
    method = AdaLog(search="exhaustive")
    weight, inputs = _normal(1, 10, 16).double(), _normal(3, 200, 16).double() + 0.5
    problem = LayerSearch(method, weight, inputs, LayerBits(bits, 2))
    problem.input_quantizer = per_tensor(inputs, 2)
    problem.search_weight()
    quantized, exact = problem.input_quantizer(inputs), inputs @ weight.T

    def output_error(grid: UniformQuantizer) -> Tensor:
        return (quantized @ grid(weight).T - exact).square().sum(0)

    candidates = method.weight_grid(weight, bits)
    found = output_error(problem.weight_quantizer)
    for scale, zero in zip(candidates.scale, candidates.zero, strict=True):
        other = output_error(UniformQuantizer(bits, scale[:, None], zero[:, None]))
        assert bool((found <= other * (1 + 1e-9)).all())


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_the_grid_of_an_operand_has_the_least_error_of_the_product(bits: int) -> None:
    method = AdaLog(search="exhaustive")
    left = _normal(5, 4, 3, 10, 6).double()
    right = _normal(6, 4, 3, 6, 10).double() * torch.logspace(-1, 1, 6)[:, None]
    fitted = method._operand(left, bits, left @ right, other=right, first=True)

    def product_error(grid: Quantizer) -> Tensor:
        return (grid(left) @ right - left @ right).square().sum(dim=(0, 2, 3))

    candidates = method.weight_grid(left.transpose(0, 1).flatten(1), bits)
    found = product_error(fitted)
    for scale, zero in zip(candidates.scale, candidates.zero, strict=True):
        other = UniformQuantizer(bits, scale[:, None, None], zero[:, None, None])
        assert bool((found <= product_error(other) * (1 + 1e-9)).all())


@pytest.mark.parametrize("bits", [2, 4, 6])
def test_the_input_of_fc2_gets_powers_and_its_shift_is_in_the_bias(bits: int) -> None:
    inputs = F.gelu(_normal(5, 300, 16))
    view = _view(FC2)
    fit = AdaLog().fit(view, LayerBits(8, bits), LayerStats(inputs))
    quantizer = fit.input_quantizer
    assert isinstance(quantizer, LogQuantizer)
    assert float(quantizer.offset) == 0.0
    assert float(quantizer.shift) >= GELU_MINIMUM
    torch.testing.assert_close(fit.bias, view.bias - quantizer.shift * fit.weight.sum(1))


def test_the_shift_covers_inputs_below_the_minimum_of_gelu() -> None:
    inputs = _normal(5, 300, 16)
    fit = AdaLog().fit(_view(FC2), LayerBits(8, 6), LayerStats(inputs))
    assert isinstance(fit.input_quantizer, LogQuantizer)
    assert float(fit.input_quantizer.shift) == pytest.approx(-float(inputs.min()))


@pytest.mark.parametrize("value", [0.0, -0.1], ids=["zero", "negative"])
def test_an_input_of_fc2_without_positive_values_is_fitted(value: float) -> None:
    inputs = torch.full((50, 16), value)
    view = _view(FC2)
    fit = AdaLog().fit(view, LayerBits(8, 4), LayerStats(inputs))
    output = layer_output(fit, inputs)
    assert bool(torch.isfinite(output).all())


def test_pictures_stay_in_float(vit: Case) -> None:
    spec = vit.graph.layer("patch_embed.proj")
    fit = AdaLog().fit(LinearView.of(vit.model, spec), LayerBits(4, 4), vit.stats[spec.name])
    assert fit.input_quantizer is None


def test_a_layer_behind_a_norm_is_folded_and_others_are_not(vit: Case) -> None:
    for spec in vit.graph.layers[1:5]:
        fit = AdaLog().fit(LinearView.of(vit.model, spec), LayerBits(4, 4), vit.stats[spec.name])
        assert (fit.fold is not None) == (spec.norm is not None)


@pytest.mark.parametrize("kind", ["broad", "sharp", "both"])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_base_of_a_softmax_is_nearly_the_best_of_all(bits: int, kind: str) -> None:
    sharpness = {"broad": 0.3, "sharp": 4.0, "both": torch.tensor([8.0, 0.5]).repeat(30)[:, None]}
    # mean values that are not zero: then it matters how much of the small probabilities is kept
    left = (sharpness[kind] * _normal(1, 3, 2, 60, 60)).softmax(dim=-1)
    right = _normal(2, 3, 2, 60, 8) + 1
    fit = AdaLog().fit_matmul(MatmulSpec("av", "av", 0), bits, 8, MatmulStats(left, right))
    exact = left @ right

    def error(quantizer: Quantizer) -> float:
        return float((quantizer(left) @ right - exact).square().sum())

    every = [error(AdaLog().log(bits, torch.ones(1), step)) for step in STEPS]
    assert error(fit.left) <= 1.1 * min(every)


@pytest.mark.parametrize("bits", [3, 4])
def test_a_few_enormous_tokens_do_not_drown_the_others(bits: int) -> None:
    inputs = F.gelu(_normal(5, 400, 16))
    inputs[::50, 0] = torch.linspace(100, 250, 8)
    view, stats = _view(FC2), LayerStats(inputs)
    exact = inputs @ view.weight.T
    ordinary = inputs[:, 0] < 100

    def error(method: AdaLog) -> float:
        fit = method.fit(view, LayerBits(8, bits), stats)
        wrong = layer_output(fit, inputs) - view.bias - exact
        return float(wrong[ordinary].norm() / exact[ordinary].norm())

    assert error(AdaLog(error="relative")) < 0.7 * error(AdaLog())


def test_tokens_of_equal_size_have_equal_shares() -> None:
    inputs = torch.eye(16)
    problem = LayerSearch(AdaLog(error="relative"), torch.eye(16), inputs, LayerBits(4, 4))
    torch.testing.assert_close(problem.shares, torch.ones(16))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_searched_fold_spares_the_weight_where_channels_differ(bits: int) -> None:
    spec = LayerSpec("blocks.0.attn.qkv", LayerRole.QKV, 0, 0, norm="blocks.0.norm1")
    inputs = _normal(5, 400, 16) * torch.tensor([30.0] + 15 * [1.0])
    view, stats = _view(spec), LayerStats(inputs)
    exact = inputs @ view.weight.T + view.bias
    errors = [
        float((layer_output(method.fit(view, LayerBits(bits, 8), stats), inputs) - exact).norm())
        for method in (AdaLog(fold="searched"), AdaLog())
    ]
    assert errors[0] < errors[1]


def test_a_searched_fold_is_the_full_one_where_that_is_best() -> None:
    spec = LayerSpec("blocks.0.attn.qkv", LayerRole.QKV, 0, 0, norm="blocks.0.norm1")
    inputs = _normal(5, 400, 16) * torch.logspace(-1.5, 1.5, 16)
    view, stats = _view(spec), LayerStats(inputs)
    fits = [
        method.fit(view, LayerBits(8, 2), stats) for method in (AdaLog(fold="searched"), AdaLog())
    ]
    assert fits[0].fold is not None
    assert fits[1].fold is not None
    assert torch.equal(fits[0].fold.ratio, fits[1].fold.ratio)


def test_the_codes_are_the_nearest_ones_without_compensation() -> None:
    view, inputs = _view(PROJ), _normal(5, 300, 16)
    fit = AdaLog().fit(view, LayerBits(3, 4), LayerStats(inputs))
    assert torch.equal(fit.codes.int(), fit.weight_quantizer.encode(view.weight))
    assert torch.equal(fit.bias, view.bias)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_compensation_lowers_the_output_error(bits: int) -> None:
    inputs = _normal(5, 400, 16) @ _normal(6, 16, 16)
    view, stats = _view(PROJ), LayerStats(inputs)
    exact = inputs @ view.weight.T + view.bias
    errors = [
        float((layer_output(method.fit(view, LayerBits(bits, 8), stats), inputs) - exact).norm())
        for method in (AdaLog(compensation="gptq"), AdaLog())
    ]
    assert errors[0] < errors[1]


@pytest.mark.parametrize("bits", [2, 4])
def test_much_damping_leaves_codes_as_rounding_to_nearest_has_them(bits: int) -> None:
    view, stats = _view(PROJ), LayerStats(_normal(5, 400, 16) @ _normal(6, 16, 16))
    nearest, compensated, held = (
        AdaLog(**options).fit(view, LayerBits(bits, 8), stats).codes
        for options in (
            {},
            {"compensation": "gptq"},
            {"compensation": "gptq", "damping": 1e6},
        )
    )
    assert torch.equal(held, nearest)
    assert not torch.equal(compensated, nearest)


@pytest.mark.parametrize("spec", [FC2, PROJ], ids=["fc2", "proj"])
def test_compensation_keeps_the_mean_output(spec: LayerSpec) -> None:
    inputs = F.gelu(_normal(5, 400, 16))
    view, stats = _view(spec), LayerStats(inputs)
    fit = AdaLog(compensation="gptq").fit(view, LayerBits(2, 3), stats)
    mean = layer_output(fit, inputs).mean(0)
    expected = (inputs @ view.weight.T + view.bias).mean(0)
    torch.testing.assert_close(mean, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("bits", range(1, 9))
def test_a_reserved_zero_is_an_honest_number_of_bits(bits: int) -> None:
    maps = _normal(5, 2, 3, 10, 10).softmax(-1)
    stats = MatmulStats(maps, _normal(6, 2, 3, 10, 4))
    site = MatmulSpec("blocks.0.attn.av", "av", 0)
    left = AdaLog(zero_code="reserved").fit_matmul(site, bits, bits, stats).left
    assert isinstance(left, LogQuantizer)
    assert left.n_codes == 2**bits
    assert len(left(maps).unique()) <= 2**bits


def test_the_operands_of_the_score_product_have_a_grid_per_head() -> None:
    stats = MatmulStats(_normal(5, 4, 3, 10, 4), _normal(6, 4, 3, 4, 10))
    fit = AdaLog().fit_matmul(MatmulSpec("blocks.0.attn.qk", "qk", 0), 3, 5, stats)
    assert isinstance(fit.left, UniformQuantizer)
    assert fit.left.scale.shape == fit.right.scale.shape == (3, 1, 1)
    assert (fit.left.bits, fit.right.bits) == (3, 5)


@pytest.mark.parametrize("kind", ["qk", "av"])
def test_the_error_of_a_product_falls_when_bits_rise(kind: str) -> None:
    left = _normal(5, 4, 3, 10, 10)
    left = left.softmax(-1) if kind == "av" else left
    right = _normal(6, 4, 3, 10, 8)
    site = MatmulSpec(f"blocks.0.attn.{kind}", kind, 0)  # type: ignore[arg-type]
    errors = []
    for bits in (2, 4, 8):
        fit = AdaLog().fit_matmul(site, bits, bits, MatmulStats(left, right))
        errors.append(float((fit.left(left) @ fit.right(right) - left @ right).norm()))
    assert errors[0] > errors[1] > errors[2]


def test_two_free_levels_suit_weights_better_than_zero_and_one_level() -> None:
    inputs = _normal(5, 400, 16)
    view, stats = _view(PROJ), LayerStats(inputs)
    exact = inputs @ view.weight.T + view.bias
    errors = [
        float((layer_output(method.fit(view, LayerBits(1, 8), stats), inputs) - exact).norm())
        for method in (AdaLog(onebit="affine"), AdaLog())
    ]
    assert errors[0] < errors[1]
