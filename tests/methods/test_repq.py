from __future__ import annotations

import pytest
import torch
from conftest import Case
from torch import Tensor

from lampq.calibrate import LayerStats, MatmulStats
from lampq.methods.base import LinearView, layer_output
from lampq.methods.minmax import MinMax
from lampq.methods.repq import PERCENTILES, RepQ, _by_percentile
from lampq.methods.search import quantiles
from lampq.quant.log import LogQuantizer
from lampq.quant.uniform import UniformQuantizer
from lampq.types import LayerBits, LayerRole, LayerSpec, MatmulSpec


def _heavy_tailed(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator) ** 3


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_range_is_the_best_of_the_percentiles(bits: int) -> None:
    rows = _heavy_tailed(5, 20_000)
    scale, zero = _by_percentile(rows, bits)
    found = (UniformQuantizer(bits, scale[:, None], zero[:, None])(rows) - rows).square().sum(1)
    for share in PERCENTILES:
        low, high = quantiles(rows, share)
        grid = UniformQuantizer.between(bits, low[:, None], high[:, None], whole=bits > 1)
        assert bool((found <= (grid(rows) - rows).square().sum(1) * (1 + 1e-6)).all())


def test_a_single_outlier_is_clipped() -> None:
    rows = torch.linspace(-1, 1, 20_000)[None].clone()
    rows[0, 0] = 5.0
    scale, _ = _by_percentile(rows, 3)
    # squared errors of about 20000 * (2 / 7)**2 / 12 + 4**2 = 152 without the outlier in range,
    # and 20000 * (6 / 7)**2 / 12 = 1224 with it
    assert float(scale) == pytest.approx(2 / 7, rel=0.01)


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_folded_input_has_the_codes_of_its_own_channel(vit: Case, bits: int) -> None:
    spec = vit.graph.layer("blocks.0.attn.qkv")
    stats = LayerStats(vit.stats[spec.name].inputs.double())
    view = LinearView.of(vit.model, spec)
    view = LinearView(spec, view.weight.double(), view.bias.double())
    fit = RepQ().fit(view, LayerBits(4, bits), stats)
    assert fit.fold is not None
    assert fit.input_quantizer is not None
    scale, zero = _by_percentile(stats.inputs.T.contiguous(), bits)
    expected = UniformQuantizer(bits, scale, zero).encode(stats.inputs)
    folded = fit.input_quantizer.encode(fit.fold.of_inputs(stats.inputs))
    assert float((folded != expected).double().mean()) < 1e-4  # ties may round either way


def test_a_layer_without_norm_is_not_folded(vit: Case) -> None:
    spec = vit.graph.layer("blocks.0.attn.proj")
    fit = RepQ().fit(LinearView.of(vit.model, spec), LayerBits(4, 4), vit.stats[spec.name])
    assert fit.fold is None


def test_channels_of_unequal_size_are_better_folded_than_not() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(400, 16, generator=generator) * torch.logspace(-1, 1, 16)
    weight = torch.randn(8, 16, generator=generator) / torch.logspace(-1, 1, 16)
    bias = torch.zeros(8)
    spec = LayerSpec("blocks.0.attn.qkv", LayerRole.QKV, 0, 128, norm="blocks.0.norm1")
    exact = inputs @ weight.T
    folded, plain = (
        float(
            (
                layer_output(
                    method.fit(LinearView(spec, weight, bias), LayerBits(8, 4), LayerStats(inputs)),
                    inputs,
                )
                - exact
            ).norm()
        )
        for method in (RepQ(), MinMax())
    )
    assert folded < 0.5 * plain


def test_pictures_keep_eight_bits(vit: Case) -> None:
    spec = vit.graph.layer("patch_embed.proj")
    fit = RepQ().fit(LinearView.of(vit.model, spec), LayerBits(2, 2), vit.stats[spec.name])
    assert fit.input_quantizer is not None
    assert fit.input_quantizer.bits == 8


@pytest.mark.parametrize("zero_code", ["extra", "reserved"])
def test_the_softmax_gets_powers_of_the_root_of_two(zero_code: str) -> None:
    maps = _heavy_tailed(2, 3, 10, 10).softmax(-1)
    stats = MatmulStats(maps, _heavy_tailed(2, 3, 10, 4))
    site = MatmulSpec("blocks.0.attn.av", "av", 0)
    left = RepQ(zero_code=zero_code).fit_matmul(site, 4, 4, stats).left  # type: ignore[arg-type]
    assert isinstance(left, LogQuantizer)
    assert (left.step, left.denominator, left.table) == (1, 2, False)
    assert left.n_codes == 16 + (zero_code == "extra")


def test_the_operands_of_the_score_product_are_uniform() -> None:
    stats = MatmulStats(_heavy_tailed(2, 3, 10, 4), _heavy_tailed(2, 3, 4, 10))
    fit = RepQ().fit_matmul(MatmulSpec("blocks.0.attn.qk", "qk", 0), 3, 5, stats)
    assert isinstance(fit.left, UniformQuantizer)
    assert isinstance(fit.right, UniformQuantizer)
    assert (fit.left.bits, fit.right.bits) == (3, 5)
