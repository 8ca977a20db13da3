"""AdaLog with another width for class and register tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import Case, fits_of
from torch import Tensor

from lampq.calibrate import LayerStats, collect
from lampq.methods.adalog import AdaLog
from lampq.methods.base import FitCache, LinearView, SiteWidths, rows_output
from lampq.quant.log import LogQuantizer
from lampq.quant.modules import MatmulFit, assemble
from lampq.quant.prefix import PrefixQuantizer
from lampq.quant.token import TokenQuantizer
from lampq.types import SEARCHED_ROLES, LayerBits, LayerRole, LayerSpec

BEST: dict[str, Any] = {"onebit": "affine", "error": "relative", "compensation": "gptq"}
PROJ = LayerSpec("b.attn.proj", LayerRole.PROJ, 0, 48, prefix=1)
FC2 = LayerSpec("b.mlp.fc2", LayerRole.FC2, 0, 48, prefix=1)


def test_searched_layers_and_products_of_a_vit_have_a_prefix(vit: Case) -> None:
    layers, sites = fits_of(vit, "adalog", 3, prefix_bits=8)
    for fit in layers:
        apart = isinstance(fit.input_quantizer, PrefixQuantizer)
        assert apart == (fit.spec.role in SEARCHED_ROLES)
    for site in sites:
        assert isinstance(site, MatmulFit)
        for part, axis in ((site.left, -1), (site.right, -2 if site.spec.kind == "qk" else -1)):
            assert isinstance(part, PrefixQuantizer)
            assert isinstance(part.prefix, TokenQuantizer)
            assert (part.count, part.axis, part.prefix.bits, part.body.bits) == (1, axis, 8, 3)


def test_models_without_a_class_token_are_fitted_as_usual(swin: Case) -> None:
    layers, sites = fits_of(swin, "adalog", 3, prefix_bits=8)
    parts: list[object] = [fit.input_quantizer for fit in layers]
    parts += [part for f in sites if isinstance(f, MatmulFit) for part in (f.left, f.right)]
    assert not any(isinstance(part, PrefixQuantizer) for part in parts)


def test_statistics_know_which_tokens_are_first(vit: Case) -> None:
    name = "blocks.0.attn.qkv"
    seen: list[Tensor] = []
    handle = vit.model.get_submodule(name).register_forward_pre_hook(
        lambda _module, given: seen.append(given[0])
    )
    try:
        stats = collect(vit.model, vit.graph, vit.samples, tokens="fisher")[name]
    finally:
        handle.remove()
    assert isinstance(stats, LayerStats)
    assert stats.first is not None
    class_tokens = torch.cat(seen)[:, 0].detach()
    for row, first in zip(stats.inputs, stats.first, strict=True):
        assert bool((class_tokens == row).all(dim=1).any()) == bool(first)
    assert 0 < int(stats.first.sum()) < len(stats.first)


@pytest.mark.parametrize("options", [{}, BEST], ids=["published", "best"])
@pytest.mark.parametrize("spec", [PROJ, FC2], ids=["proj", "fc2"])
def test_a_class_token_unlike_the_patches_harms_neither_itself_nor_them(
    spec: LayerSpec, options: dict[str, Any]
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(12, 16, generator=generator)
    bias = torch.randn(12, generator=generator)
    inputs = torch.randn(400, 16, generator=generator)
    first = torch.arange(400) % 10 == 0
    inputs[first] *= 30
    if spec.role is LayerRole.FC2:
        inputs = torch.nn.functional.gelu(inputs)
    layer, stats = LinearView(spec, weight, bias), LayerStats(inputs, first=first)
    exact = inputs @ weight.T + bias

    def errors(prefix_bits: Any) -> list[float]:
        fit = AdaLog(prefix_bits=prefix_bits, **options).fit(layer, LayerBits(8, 3), stats)
        wrong = (rows_output(fit, inputs, first) - exact).square().sum(1) / exact.square().sum(1)
        return [float(wrong[first].mean()), float(wrong[~first].mean())]

    together, apart = errors("target"), errors(8)
    assert apart[0] < 0.1 * together[0]
    assert apart[1] < together[1]


def test_the_shift_of_a_logarithmic_input_stays_in_its_quantizer(vit: Case) -> None:
    layers, _ = fits_of(vit, "adalog", 3, prefix_bits=8)
    for fit in layers:
        if fit.spec.role is LayerRole.FC2:
            assert isinstance(fit.input_quantizer, PrefixQuantizer)
            body = fit.input_quantizer.body
            assert isinstance(body, LogQuantizer)
            assert torch.equal(body.offset, body.shift)


@torch.no_grad()
def test_more_bits_for_the_class_token_bring_it_nearer_to_float(vit: Case) -> None:
    exact = vit.model(vit.samples.images)

    def error(prefix_bits: Any) -> float:
        model = assemble(vit.model, *fits_of(vit, "adalog", 3, prefix_bits=prefix_bits))
        return float((model(vit.samples.images) - exact).norm())

    assert error(8) < error("target")


def test_the_error_of_a_layer_is_that_of_its_rows_where_they_stand(vit: Case) -> None:
    method = AdaLog(prefix_bits=8)
    sites = SiteWidths(LayerBits(8, 8), 3)
    fits = FitCache(vit.model, vit.graph, method, vit.stats, sites)
    name, bits = "blocks.1.mlp.fc1", LayerBits(3, 3)
    stats = vit.stats[name]
    assert isinstance(stats, LayerStats)
    assert stats.first is not None
    fit = fits.layer(name, bits)
    view = LinearView.of(vit.model, fit.spec)
    folded = stats.inputs if fit.fold is None else fit.fold.of_inputs(stats.inputs)
    quantizer = fit.input_quantizer
    assert isinstance(quantizer, PrefixQuantizer)
    rows = torch.stack(
        [
            (quantizer.prefix if one else quantizer.body)(row[None])[0]
            for row, one in zip(folded, stats.first, strict=True)
        ]
    )
    exact = stats.inputs @ view.weight.T
    wrong = rows @ fit.weight.T + fit.bias - view.bias - exact
    expected = float(wrong.square().sum() / exact.square().sum())
    assert fits.error(name, bits) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("norm", [None, "b.norm1"])
def test_layers_of_which_only_class_tokens_were_seen_are_fitted(norm: str | None) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(20, 16, generator=generator)
    spec = LayerSpec("b.attn.qkv", LayerRole.QKV, 0, 48, norm=norm, prefix=1)
    layer = LinearView(spec, torch.randn(12, 16, generator=generator), torch.zeros(12))
    first = torch.ones(20, dtype=torch.bool)
    fit = AdaLog(prefix_bits=8).fit(layer, LayerBits(8, 8), LayerStats(inputs, first=first))
    exact = inputs @ layer.weight.T
    assert float((rows_output(fit, inputs, first) - exact).norm() / exact.norm()) < 0.05
