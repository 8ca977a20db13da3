from __future__ import annotations

import pytest
import torch
from conftest import Case
from torch import nn

from lampq.calibrate import LayerStats, MatmulStats
from lampq.errors import GraphError
from lampq.hooks import recording
from lampq.methods import METHODS, FitCache, SiteWidths, sequential
from lampq.methods.sequential import collect_in_order, execution_order
from lampq.pipeline import quantize
from lampq.quant.modules import assemble
from lampq.tokens import tokens_of
from lampq.types import BitPlan, LayerBits

WIDTH = LayerBits(3, 3)


def test_each_site_sees_what_the_quantized_sites_before_it_give(case: Case) -> None:
    method, sites = METHODS.get("repq")(), SiteWidths(WIDTH, 3)
    plan = BitPlan.uniform(case.graph.allocatable, WIDTH)
    stats = collect_in_order(case.model, case.graph, case.samples, method, plan, sites)
    fits = FitCache(case.model, case.graph, method, stats, sites)
    quantized = assemble(case.model, *fits.of_plan(plan))
    names = [*(layer.name for layer in case.graph.layers), *(m.name for m in case.graph.matmuls)]
    with recording(quantized, names) as seen:
        quantized(case.samples.inputs(slice(None)))
    for layer in case.graph.layers:
        kept = stats[layer.name]
        assert isinstance(kept, LayerStats)
        rows = tokens_of(case.model.get_submodule(layer.name), seen[layer.name][0])
        fold = fits.layer(layer.name, WIDTH).fold
        expected = kept.inputs if fold is None else fold.of_inputs(kept.inputs)
        torch.testing.assert_close(rows, expected, rtol=1e-3, atol=1e-3)
    for site in case.graph.matmuls:
        operands = stats[site.name]
        assert isinstance(operands, MatmulStats)
        left = seen[site.name][0][: len(operands.left)]
        torch.testing.assert_close(operands.left[:1], left[:1], rtol=1e-3, atol=1e-3)


def test_the_order_is_that_of_the_calls() -> None:
    model = nn.ModuleDict({"late": nn.Linear(2, 2), "early": nn.Linear(2, 2)})
    model.forward = lambda x: model["late"](model["early"](x))  # type: ignore[method-assign]
    found = execution_order(model, ["late", "early"], lambda one: one(torch.ones(1, 2)))
    assert list(found.items()) == [("early", 1), ("late", 1)]
    model["never"] = nn.Linear(2, 2)
    with pytest.raises(GraphError, match="'never' is never called"):
        execution_order(model, ["early", "never"], lambda one: one(torch.ones(1, 2)))


def test_which_inputs_a_method_is_fitted_on(vit: Case) -> None:
    def scales(method: str, inputs: str) -> torch.Tensor:
        result = quantize(
            vit.original,
            vit.samples,
            bits=3,
            preset="paper",
            method=method,
            fit_inputs=inputs,
            choices=(3,),
            metric="recon",
            exchanges=0,
        )
        fit = result.fits.layer("blocks.1.mlp.fc2", WIDTH)
        assert fit.input_quantizer is not None
        scale = fit.input_quantizer.scale
        assert isinstance(scale, torch.Tensor)
        return scale

    for method, own, other in (("repq", "quantized", "float"), ("minmax", "float", "quantized")):
        assert torch.equal(scales(method, "published"), scales(method, own))
        assert not torch.equal(scales(method, "published"), scales(method, other))


def test_only_so_many_images_are_looked_at(vit: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequential, "MAX_IMAGES", 2)
    method, sites = METHODS.get("repq")(), SiteWidths(WIDTH, 3)
    plan = BitPlan.uniform(vit.graph.allocatable, WIDTH)
    stats = collect_in_order(vit.model, vit.graph, vit.samples, method, plan, sites)
    first = vit.graph.matmuls[0]
    operands = stats[first.name]
    assert isinstance(operands, MatmulStats)
    assert len(operands.left) == 2 < len(vit.samples)
