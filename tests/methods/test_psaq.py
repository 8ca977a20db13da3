from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import Case, fits_of, same_quantizer

from lampq.artifact.checkpoint import checkpoint_bytes, load_checkpoint, read_checkpoint
from lampq.artifact.onnx.sites import runs_in_integers
from lampq.calibrate import LayerStats, MatmulStats
from lampq.evaluate import divergence, predict
from lampq.hooks import recording
from lampq.methods import METHODS, FitCache, SiteWidths
from lampq.methods.base import LinearView
from lampq.methods.psaq import PSAQ, psaq, symmetric_rows
from lampq.models import ModelSource
from lampq.pipeline import quantize
from lampq.quant.modules import (
    MatmulFit,
    QuantLayer,
    QuantMatMul,
    QuantSum,
    SumFit,
    assemble,
)
from lampq.reconstruct.trainable import fitted, trainable
from lampq.types import BitPlan, LayerBits, LayerRole, SumSpec

USER = ModelSource("user", "Tiny", {})


@pytest.mark.parametrize("bits", [2, 3, 4, 8, 10])
def test_a_row_is_rounded_to_whole_steps_of_its_largest_magnitude(bits: int) -> None:
    weight = torch.randn(5, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    # scale and clamp as PSAQ-ViT has them, written out
    scale = weight.abs().amax(dim=1, keepdim=True) / ((2**bits - 1) / 2)
    codes = (weight / scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    torch.testing.assert_close(symmetric_rows(weight, bits)(weight), codes * scale)


def test_zero_is_exact_from_two_bits_on() -> None:
    weight = torch.tensor([[0.0, 0.4, -1.3]])
    assert all(float(symmetric_rows(weight, b)(weight)[0, 0]) == 0 for b in range(2, 11))


def test_one_bit_has_two_levels_of_equal_size() -> None:
    weight = torch.tensor([[-0.2, 0.1, 2.0]])
    torch.testing.assert_close(symmetric_rows(weight, 1)(weight), torch.tensor([[-2.0, 2.0, 2.0]]))


def test_every_output_but_that_of_fc1_is_quantized_between_its_extremes(case: Case) -> None:
    for spec in case.graph.layers:
        view, stats = LinearView.of(case.model, spec), case.stats[spec.name]
        assert isinstance(stats, LayerStats)
        output = PSAQ().fit(view, LayerBits(4, 6), stats).output_quantizer
        if spec.role is LayerRole.FC1:
            assert output is None
            continue
        assert output is not None
        assert output.bits == 6
        exact = stats.inputs @ view.weight.T + view.bias
        step = float(exact.max() - exact.min()) / 63
        assert float(output.scale) == pytest.approx(step, rel=1e-5)
        assert float((output(exact) - exact).abs().max()) <= step * 1.001


def test_scores_are_quantized_and_softmax_and_values_are_not(case: Case) -> None:
    for site in case.graph.matmuls:
        stats = case.stats[site.name]
        assert isinstance(stats, MatmulStats)
        fit = PSAQ().fit_matmul(site, 5, 5, stats)
        assert (fit.left, fit.right) == (None, None)
        assert (fit.output is None) == (site.kind == "av")
        if fit.output is not None:
            scores = stats.left @ stats.right
            assert len(fit.output(scores).unique()) <= 32


def test_queries_keys_and_values_share_the_grid_of_the_qkv_output(vit: Case) -> None:
    fits = fits_of(vit, "psaq", 4)
    model = assemble(vit.model, *fits)
    with recording(model, ["blocks.0.attn.av"]) as seen:
        predict(model, vit.samples)
    values = seen["blocks.0.attn.av"][1]
    output = next(f for f in fits[0] if f.spec.name == "blocks.0.attn.qkv").output_quantizer
    assert output is not None
    torch.testing.assert_close(output(values.contiguous()), values.contiguous())


def test_sums_take_their_width_from_the_products_or_from_the_layer_before(vit: Case) -> None:
    plan = BitPlan.uniform(vit.graph.allocatable, LayerBits(4, 6))
    plan = plan.with_bits("blocks.1.mlp.fc2", LayerBits(2, 3))
    last = SumSpec("blocks.1.sum2", LayerRole.FC2, 1)
    assert SiteWidths(LayerBits(8, 8), 7).of_sum(last, plan) == 7
    assert SiteWidths(LayerBits(8, 8), None).of_sum(last, plan) == 3
    fits = FitCache(vit.model, vit.graph, PSAQ(), vit.stats, SiteWidths(LayerBits(8, 8), None))
    _, sites = fits.of_plan(plan)
    found = {s.spec.name: s.quantizer.bits for s in sites if isinstance(s, SumFit)}
    assert found == dict.fromkeys(found, 6) | {"blocks.1.sum2": 3}
    assert set(found) == {site.name for site in vit.graph.sums}


@pytest.mark.parametrize("method", [name for name in METHODS if name != "psaq"])
def test_no_other_method_quantizes_outputs_or_sums(vit: Case, method: str) -> None:
    layers, sites = fits_of(vit, method, 8)
    assert all(fit.output_quantizer is None for fit in layers)
    assert all(isinstance(site, MatmulFit) and site.output is None for site in sites)


def test_without_outputs_and_sums_the_same_grids_are_at_the_inputs(vit: Case) -> None:
    assert isinstance(psaq("published"), PSAQ)
    fits = FitCache(vit.model, vit.graph, psaq("inputs"), vit.stats, SiteWidths(LayerBits(8, 8), 6))
    plan = BitPlan.uniform(vit.graph.allocatable, LayerBits(4, 6))
    layers, sites = fits.of_plan(plan)
    published = FitCache(vit.model, vit.graph, PSAQ(), vit.stats, SiteWidths(LayerBits(8, 8), 6))
    for fit, other in zip(layers, published.of_plan(plan)[0], strict=True):
        assert fit.output_quantizer is None
        assert torch.equal(fit.codes, other.codes)
        assert same_quantizer(fit.input_quantizer, other.input_quantizer)
    for site in sites:
        assert isinstance(site, MatmulFit)
        assert (site.left is None) == (site.spec.kind == "av")
        assert site.right is not None
        assert (site.right.bits, site.output) == (6, None)


def test_the_preset_says_at_which_sites(vit: Case) -> None:
    options = {"method": "psaq", "bits": 4, "choices": (4,), "metric": "recon", "exchanges": 0}
    for preset, sums in (("paper", True), ("best", False)):
        result = quantize(vit.original, vit.samples, preset=preset, **options)
        assert any(isinstance(m, QuantSum) for m in result.model.modules()) is sums


@pytest.mark.parametrize("preset", ["best", "paper"])
def test_for_speed_only_the_inputs_of_layers_are_quantized(vit: Case, preset: str) -> None:
    options = {"method": "psaq", "bits": 4, "choices": (4,), "metric": "recon", "exchanges": 0}
    result = quantize(vit.original, vit.samples, preset=preset, profile="speed", **options)
    kinds = (QuantLayer, QuantMatMul, QuantSum)
    sites = [module for module in result.model.modules() if isinstance(module, kinds)]
    assert len(sites) == len(vit.graph.layers)
    for layer in sites:
        assert isinstance(layer, QuantLayer)
        assert layer.output_quantizer is None
        assert runs_in_integers(layer)


def test_more_activation_bits_come_closer_to_the_float_model(case: Case) -> None:
    exact = predict(case.model, case.samples)

    def gap(act_bits: int) -> float:
        sites = SiteWidths(LayerBits(10, act_bits), act_bits)
        fits = FitCache(case.model, case.graph, PSAQ(), case.stats, sites)
        plan = BitPlan.uniform(case.graph.allocatable, LayerBits(10, act_bits))
        return divergence(predict(assemble(case.model, *fits.of_plan(plan)), case.samples), exact)

    assert gap(8) < gap(6) < gap(4)


def test_a_checkpoint_keeps_outputs_and_sums_in_format_three(case: Case, tmp_path: Path) -> None:
    model = assemble(case.model, *fits_of(case, "psaq", 9))
    path = tmp_path / "model.safetensors"
    path.write_bytes(checkpoint_bytes(model, USER, {}))
    header, _ = read_checkpoint(path)
    assert header.content["format_version"] == 3
    loaded = load_checkpoint(path, case.original)
    assert torch.equal(predict(loaded, case.samples), predict(model, case.samples))
    sums = [m for m in loaded.modules() if isinstance(m, QuantSum)]
    assert len(sums) == len(case.graph.sums)


@pytest.mark.parametrize(
    ("bits", "version"), [(LayerBits(8, 8), 2), (LayerBits(8, 9), 3), (LayerBits(9, 8), 3)], ids=str
)
def test_a_checkpoint_without_them_needs_format_three_for_wide_layers_only(
    vit: Case, tmp_path: Path, bits: LayerBits, version: int
) -> None:
    fits = FitCache(
        vit.model, vit.graph, METHODS.get("minmax")(), vit.stats, SiteWidths(LayerBits(8, 8), 8)
    )
    model = fits.assembled(BitPlan.uniform(vit.graph.allocatable, bits))
    path = tmp_path / "model.safetensors"
    path.write_bytes(checkpoint_bytes(model, USER, {}))
    assert read_checkpoint(path)[0].content["format_version"] == version
    loaded = load_checkpoint(path, vit.original)
    assert torch.equal(predict(loaded, vit.samples), predict(model, vit.samples))


def test_training_starts_from_the_same_quantized_model(case: Case) -> None:
    layers, sites = fits_of(case, "psaq", 4)
    before = predict(assemble(case.model, layers, sites), case.samples)
    opened = trainable(case.model, layers, sites)
    torch.testing.assert_close(predict(opened, case.samples), before, rtol=1e-3, atol=1e-3)
    again = fitted(opened)
    torch.testing.assert_close(predict(again, case.samples), before, rtol=1e-3, atol=1e-3)
    assert sum(isinstance(m, QuantSum) for m in again.modules()) == len(case.graph.sums)


def test_a_search_around_four_bits_with_eight_bit_inputs_ends_within_its_budget(vit: Case) -> None:
    options = {"method": "psaq", "preset": "paper", "bits": 4, "act_bits": 8, "exchanges": 3}
    # answers of a random model hardly fall, and a plan may be below the uniform one
    options |= {"alpha_signal": "kl", "fallback": "none"}
    result = quantize(vit.original, vit.samples, **options)
    assert result.plan.mean_weight_bits <= 4
    widths = set(result.plan.values())
    assert all(bits.activation == bits.weight + 4 for bits in widths)
    table = result.sensitivity
    assert table is not None
    assert [str(c) for c in table.table.choices] == ["2/6", "3/7", "4/8", "5/9", "6/10"]


def test_statistics_behind_quantized_sites_have_sums_too(vit: Case) -> None:
    result = quantize(
        vit.original,
        vit.samples,
        method="psaq",
        preset="paper",
        bits=8,
        fit_inputs="quantized",
        choices=(8,),
        metric="recon",
        exchanges=0,
    )
    plain = assemble(vit.model, *fits_of(vit, "psaq", 8))
    names = [site.name for site in vit.graph.sums]
    grids = [[m.get_submodule(n).quantizer for n in names] for m in (result.model, plain)]
    assert not all(same_quantizer(a, b) for a, b in zip(*grids, strict=True))
