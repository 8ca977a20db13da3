"""AdaLog with one range per token."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from conftest import Case, fits_of
from torch import Tensor
from torch.nn import functional as F

from lampq.calibrate import LayerStats, MatmulStats
from lampq.methods.adalog import AdaLog
from lampq.methods.base import LinearView, layer_output
from lampq.quant.modules import MatmulFit, QuantMatMul
from lampq.quant.token import PerToken, TokenLogQuantizer, TokenQuantizer
from lampq.types import LayerBits, LayerRole, LayerSpec, MatmulSpec

PROJ = LayerSpec("b.attn.proj", LayerRole.PROJ, 0, 48)
QK = MatmulSpec("b.attn.qk", "qk", 0)
BEST: dict[str, Any] = {"onebit": "affine", "error": "relative", "compensation": "gptq"}


def uneven(seed: int, *shape: int) -> Tensor:
    """Tokens whose sizes differ by a factor of a hundred."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-1, 1, shape[-2])[:, None]
    return torch.randn(shape, generator=generator) * sizes


def view(outputs: int = 12, inputs: int = 16, spec: LayerSpec = PROJ) -> LinearView:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(outputs, inputs, generator=generator)
    return LinearView(spec, weight, torch.randn(outputs, generator=generator))


def test_searched_layers_without_a_norm_and_all_products_have_ranges_per_token(case: Case) -> None:
    layers, sites = fits_of(case, "adalog", 3, input_ranges="token")
    kinds = {f.spec.role: type(f.input_quantizer) for f in layers}
    ranged = {role: kind for role, kind in kinds.items() if issubclass(kind, PerToken)}
    assert ranged == {LayerRole.PROJ: TokenQuantizer, LayerRole.FC2: TokenLogQuantizer}
    for site in sites:
        assert isinstance(site, MatmulFit)
        left = TokenQuantizer if site.spec.kind == "qk" else TokenLogQuantizer
        assert (type(site.left), type(site.right)) == (left, TokenQuantizer)


def test_ranges_are_static_unless_asked(vit: Case) -> None:
    layers, sites = fits_of(vit, "adalog", 3)
    parts: list[object] = [f.input_quantizer for f in layers]
    parts += [part for f in sites if isinstance(f, MatmulFit) for part in (f.left, f.right)]
    assert not any(isinstance(part, PerToken) for part in parts)


@pytest.mark.parametrize("options", [{}, BEST], ids=["published", "best"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_tokens_of_different_sizes_have_a_smaller_relative_error(
    bits: int, options: dict[str, Any]
) -> None:
    layer, inputs = view(), uneven(2, 400, 16)
    exact = inputs @ layer.weight.T + layer.bias
    errors = {}
    for ranges in ("static", "token"):
        method = AdaLog(input_ranges=ranges, **options)
        fit = method.fit(layer, LayerBits(8, bits), LayerStats(inputs))
        wrong = (layer_output(fit, inputs) - exact).square().sum(1)
        errors[ranges] = float((wrong / exact.square().sum(1)).mean())
    assert errors["token"] < errors["static"]


@pytest.mark.parametrize("search", ["fast", "exhaustive"])
@pytest.mark.parametrize("error", ["plain", "relative"])
def test_the_clip_is_the_best_of_a_fine_ladder(
    search: Literal["fast", "exhaustive"], error: Literal["plain", "relative"]
) -> None:
    layer, inputs = view(), uneven(2, 300, 16)
    method = AdaLog(input_ranges="token", search=search, error=error, compensation="none")
    fit = method.fit(layer, LayerBits(8, 3), LayerStats(inputs))
    assert isinstance(fit.input_quantizer, TokenQuantizer)
    exact = inputs @ layer.weight.T
    size = (exact + layer.bias).square().sum(1)
    shares = 1 / (size + size.median())

    def wrong(quantizer: TokenQuantizer) -> float:
        squared = (quantizer(inputs) @ fit.weight.T - exact).square().sum(1)
        relative = squared @ (shares / shares.mean())
        return float(squared.sum() if error == "plain" else (squared.sum() * relative).sqrt())

    ladder = [TokenQuantizer(3, torch.tensor(c / 100)) for c in range(10, 101)]
    assert wrong(fit.input_quantizer) <= 1.01 * min(map(wrong, ladder))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_products_of_uneven_tokens_are_nearer(bits: int) -> None:
    left, right = uneven(3, 4, 2, 20, 8), uneven(4, 4, 2, 20, 8).mT
    stats, exact = MatmulStats(left, right), left @ right
    errors = {}
    for ranges in ("static", "token"):
        fit = AdaLog(input_ranges=ranges).fit_matmul(QK, bits, bits, stats)
        errors[ranges] = float((QuantMatMul(fit)(left, right) - exact).square().sum())
    assert errors["token"] < errors["static"]


def test_each_head_has_a_clip_and_keys_are_turned() -> None:
    left, right = uneven(3, 4, 2, 20, 8), uneven(4, 4, 2, 20, 8).mT
    fit = AdaLog(input_ranges="token").fit_matmul(QK, 3, 4, MatmulStats(left, right))
    assert isinstance(fit.left, TokenQuantizer)
    assert isinstance(fit.right, TokenQuantizer)
    assert (fit.left.bits, fit.left.axis, fit.right.bits, fit.right.axis) == (3, -1, 4, -2)
    assert fit.left.clip.shape == fit.right.clip.shape == (2, 1, 1)


AV = MatmulSpec("b.attn.av", "av", 0)
FC2 = LayerSpec("b.mlp.fc2", LayerRole.FC2, 0, 48)


def test_values_are_not_turned() -> None:
    left = uneven(3, 4, 2, 20, 20).softmax(-1)
    right = uneven(4, 4, 2, 20, 8)
    fit = AdaLog(input_ranges="token").fit_matmul(AV, 3, 3, MatmulStats(left, right))
    assert isinstance(fit.right, TokenQuantizer)
    assert (fit.right.axis, fit.right.clip.shape) == (-1, (2, 1, 1))


@pytest.mark.parametrize("search", ["fast", "exhaustive"])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_rows_of_a_softmax_that_look_at_many_places_keep_what_they_see(
    bits: int, search: Literal["fast", "exhaustive"]
) -> None:
    # one row of four looks at a single place, the others at all of them
    scores = torch.randn(4, 2, 20, 20, generator=torch.Generator().manual_seed(0))
    left = (scores + 9 * torch.eye(20) * (torch.arange(20) % 4 == 0)).softmax(-1)
    right = torch.randn(4, 2, 20, 8, generator=torch.Generator().manual_seed(1))
    stats, exact = MatmulStats(left, right), left @ right
    errors = {}
    for ranges in ("static", "token"):
        fit = AdaLog(input_ranges=ranges, search=search).fit_matmul(AV, bits, 8, stats)
        wrong = (QuantMatMul(fit)(left, right) - exact).square().sum(-1)
        errors[ranges] = float((wrong / exact.square().sum(-1)).mean())
    assert errors["token"] < errors["static"] / 2


def behind_gelu(seed: int, tokens: int = 400, channels: int = 16) -> Tensor:
    """Activations whose sizes differ from token to token."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-0.5, 2, tokens)[:, None]
    return F.gelu(torch.randn(tokens, channels, generator=generator) * sizes)


@pytest.mark.parametrize("options", [{}, BEST], ids=["published", "best"])
@pytest.mark.parametrize("search", ["fast", "exhaustive"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_tokens_behind_gelu_have_a_smaller_relative_error(
    bits: int, search: str, options: dict[str, Any]
) -> None:
    layer, inputs = view(spec=FC2), behind_gelu(2)
    exact = inputs @ layer.weight.T + layer.bias
    errors = {}
    for ranges in ("static", "token"):
        method = AdaLog(input_ranges=ranges, search=search, **options)
        fit = method.fit(layer, LayerBits(8, bits), LayerStats(inputs))
        wrong = (layer_output(fit, inputs) - exact).square().sum(1)
        errors[ranges] = float((wrong / exact.square().sum(1)).mean())
    assert errors["token"] < errors["static"]


@pytest.mark.parametrize("error", ["plain", "relative"])
def test_part_and_base_are_the_best_of_a_fine_ladder(error: Literal["plain", "relative"]) -> None:
    layer, inputs = view(spec=FC2), behind_gelu(3, 200)
    method = AdaLog(input_ranges="token", search="exhaustive", error=error, compensation="none")
    fit = method.fit(layer, LayerBits(8, 3), LayerStats(inputs))
    found = fit.input_quantizer
    assert isinstance(found, TokenLogQuantizer)
    exact = inputs @ layer.weight.T
    size = (exact + layer.bias).square().sum(1)
    shares = 1 / (size + size.median())

    def wrong(quantizer: TokenLogQuantizer) -> float:
        squared = (quantizer(inputs) @ fit.weight.T - exact).square().sum(1)
        relative = squared @ (shares / shares.mean())
        return float(squared.sum() if error == "plain" else (squared.sum() * relative).sqrt())

    ladder = [
        method.token_log(3, torch.tensor([c / 20]), step, found.shift)
        for c in range(4, 21)
        for step in range(10, 80, 2)
    ]
    assert wrong(found) <= 1.02 * min(map(wrong, ladder))


DEGENERATE = {
    "zero": torch.zeros(40, 16),
    "constant": torch.full((40, 16), -0.7),
    "one token": torch.linspace(-1, 1, 16)[None],
    "one channel": torch.eye(16)[:1] * torch.linspace(-1, 1, 40)[:, None],
    "huge": torch.linspace(-1e4, 1e4, 640).view(40, 16),
    "tiny": torch.linspace(-1e-6, 1e-6, 640).view(40, 16),
}


@pytest.mark.parametrize("options", [{}, BEST], ids=["published", "best"])
@pytest.mark.parametrize("name", DEGENERATE)
@pytest.mark.parametrize("bits", [1, 4])
@pytest.mark.parametrize("spec", [PROJ, FC2], ids=["proj", "fc2"])
def test_inputs_without_much_in_them_are_fitted(
    spec: LayerSpec, name: str, bits: int, options: dict[str, Any]
) -> None:
    layer, inputs = view(spec=spec), DEGENERATE[name]
    method = AdaLog(input_ranges="token", **options)
    fit = method.fit(layer, LayerBits(bits, bits), LayerStats(inputs))
    assert bool(torch.isfinite(layer_output(fit, inputs)).all())
