from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from conftest import Case

from lampq.methods import METHODS, FitCache, SiteWidths
from lampq.quant.log import LogQuantizer
from lampq.quant.token import TokenQuantizer
from lampq.quant.uniform import UniformQuantizer
from lampq.report.histograms import (
    BINS,
    compact,
    histogram,
    histograms_json,
    levels,
    places,
    thinned,
)
from lampq.types import BitPlan, LayerBits, LayerRole

NORMAL = torch.randn(40, 300, generator=torch.Generator().manual_seed(0))


def test_levels_of_a_weight_are_by_row() -> None:
    scale, zero = torch.tensor([[1.0], [0.5]]), torch.tensor([[0.0], [2.0]])
    found = levels(UniformQuantizer(2, scale, zero), 2, "rows")
    assert found.tolist() == [[0.0, 1.0, 2.0, 3.0], [-1.0, -0.5, 0.0, 0.5]]


def test_levels_of_an_input_are_by_column() -> None:
    scale, zero = torch.tensor([1.0, 0.5]), torch.tensor([0.0, 2.0])
    found = levels(UniformQuantizer(2, scale, zero), 2, "columns")
    assert found.tolist() == [[0.0, 1.0, 2.0, 3.0], [-1.0, -0.5, 0.0, 0.5]]


@pytest.mark.parametrize("offset", [0.0, 0.25])
def test_levels_of_a_shifted_log_quantizer_are_where_its_inputs_are(offset: float) -> None:
    quantizer = LogQuantizer(
        4, torch.tensor(2.0), torch.tensor(0.25), torch.tensor(offset), step=1, denominator=1
    )
    found = levels(quantizer, 1, "columns")[0] - quantizer.lift
    # zero of the log grid stands for minus the shift, the largest power for scale minus shift
    assert (float(found[0]), float(found[-1])) == (-0.25, 1.75)


def test_a_shared_grid_is_shown_by_value_with_numpys_counts() -> None:
    grid = torch.linspace(-2, 2, 8)
    found = histogram(NORMAL, grid.expand(40, -1))
    assert found["unit"] == "value"
    expected, _ = np.histogram(NORMAL.numpy(), bins=BINS, range=(found["low"], found["high"]))
    # a value on the border of two bins may go to either
    assert np.abs(np.array(found["counts"]) - expected).sum() <= 4
    assert sum(found["counts"]) + found["below"] + found["above"] == NORMAL.numel()
    assert found["levels"] == pytest.approx({"first": -2.0, "step": 4 / 7, "count": 8})


def test_rows_with_grids_of_their_own_are_shown_in_their_steps() -> None:
    scale = torch.tensor([[1.0], [10.0]])
    grids = scale * torch.arange(4.0)
    values = grids + 0.25 * scale
    found = histogram(values, grids)
    assert found["unit"] == "step"
    assert found["levels"] == pytest.approx({"first": 0.0, "step": 1.0, "count": 4})
    width = (found["high"] - found["low"]) / BINS
    centres = [found["low"] + (i + 0.5) * width for i, n in enumerate(found["counts"]) if n]
    assert [round(centre * 4) / 4 for centre in centres] == [0.25, 1.25, 2.25, 3.25]


def test_places_are_those_of_the_codes_before_rounding() -> None:
    scale, zero = torch.tensor([[0.3], [0.07]]), torch.tensor([[1.0], [2.0]])
    quantizer = UniformQuantizer(2, scale, zero)
    values = NORMAL[:2]
    found = places(values, levels(quantizer, 2, "rows"))
    assert torch.allclose(found, values / scale + zero, atol=1e-3)
    assert torch.equal(found.round().clamp(0, 3).int(), quantizer.encode(values))


def test_a_far_tail_is_counted_but_not_drawn() -> None:
    values = torch.cat([NORMAL.flatten(), torch.tensor([1e6, -1e6, 2e6])])[None]
    found = histogram(values, torch.linspace(-2, 2, 4)[None])
    assert -10 < found["low"] < found["high"] < 10
    assert found["above"] >= 2
    assert found["below"] >= 1


def test_equal_values_have_a_histogram_too() -> None:
    found = histogram(torch.zeros(2, 5), torch.zeros(2, 2))
    assert sum(found["counts"]) == 10
    assert found["low"] < 0 < found["high"]


def test_uneven_levels_are_listed_one_by_one() -> None:
    assert compact(torch.tensor([0.0, 0.25, 0.5, 1.0])) == [0.0, 0.25, 0.5, 1.0]
    assert compact(torch.tensor([-1.0, 1.0])) == [-1.0, 1.0]


def test_few_rows_are_kept_as_they_are_and_many_thinned_evenly() -> None:
    rows = torch.arange(101.0)[:, None]
    assert torch.equal(thinned(rows, 101), rows)
    assert thinned(rows, 5).flatten().tolist() == [0.0, 25.0, 50.0, 75.0, 100.0]


def test_inputs_with_a_range_per_token_are_shown_in_steps_of_their_tokens(case: Case) -> None:
    method = METHODS.get("adalog")(input_ranges="token")
    fits = FitCache(case.model, case.graph, method, case.stats, SiteWidths(LayerBits(8, 8), 3))
    plan = BitPlan.uniform(case.graph.allocatable, LayerBits(3, 3))
    spec = next(x for x in case.graph.layers if x.role is LayerRole.PROJ)
    fit = fits.layer(spec.name, LayerBits(3, 3))
    entry = histograms_json(fits, plan)["layers"][spec.name]["input"]
    assert (entry["kind"], entry["bits"], entry["unit"]) == ("token", 3, "step")
    assert entry["levels"] == pytest.approx({"first": 0.0, "step": 1.0, "count": 8})
    assert isinstance(fit.input_quantizer, TokenQuantizer)
    seen = thinned(fits.inputs(spec.name), 256)
    total = sum(entry["counts"]) + entry["below"] + entry["above"]
    assert total == seen.numel()
    grid = fit.input_quantizer.at(seen)
    found = places(seen, levels(grid, len(seen), "rows"))
    torch.testing.assert_close(found, seen / grid.scale + grid.zero, rtol=1e-3, atol=1e-3)


def test_inputs_are_shown_without_first_tokens_of_another_width(vit: Case) -> None:
    method = METHODS.get("adalog")(prefix_bits=8)
    fits = FitCache(vit.model, vit.graph, method, vit.stats, SiteWidths(LayerBits(8, 8), 3))
    plan = BitPlan.uniform(vit.graph.allocatable, LayerBits(3, 3))
    entry = histograms_json(fits, plan)["layers"]["blocks.0.mlp.fc2"]["input"]
    assert (entry["kind"], entry["bits"], len(entry["levels"])) == ("log", 3, 9)
    stats = fits.stats("blocks.0.mlp.fc2")
    assert stats.first is not None
    shown = thinned(stats.inputs, 256)[~thinned(stats.first, 256)]
    assert sum(entry["counts"]) + entry["below"] + entry["above"] == shown.numel()


@pytest.mark.parametrize("method", ["minmax", "adalog", "ptq4vit"])
def test_all_quantized_layers_of_a_run_are_there(case: Case, method: str) -> None:
    width = LayerBits(3, 3)
    sites = SiteWidths(LayerBits(8, 8), 3)
    fits = FitCache(case.model, case.graph, METHODS.get(method)(), case.stats, sites)
    plan = BitPlan.uniform(case.graph.allocatable, width)
    content = histograms_json(fits, plan)
    assert list(content["layers"]) == [layer.name for layer in case.graph.layers]
    for layer in case.graph.layers:
        entry = content["layers"][layer.name]
        bits = plan.get(layer.name, LayerBits(8, 8))
        assert entry["weight"]["bits"] == bits.weight
        counts = entry["weight"]["counts"]
        assert sum(counts) + entry["weight"]["below"] + entry["weight"]["above"] == layer.n_params
        # all tokens of six small images are used, so the error is that of the cache
        if len(fits.inputs(layer.name)) <= content["tokens"]:
            assert entry["error"] == pytest.approx(fits.error(layer.name, bits), rel=1e-4)
    # at eight bits: 80 counts and at most 257 levels a side
    assert len(json.dumps(content)) < 6000 * len(case.graph.layers)
