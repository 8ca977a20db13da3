from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import Case
from torch import Tensor, nn

from lampq.allocate import allocate_ilp
from lampq.methods import FitCache, SiteWidths
from lampq.methods.minmax import MinMax
from lampq.metrics.base import Evidence
from lampq.metrics.nuclear import NuclearNorm, modules_of, nuclear_norms
from lampq.progress import Journal
from lampq.quant.modules import assemble
from lampq.types import Budget, LayerBits, LayerRole

CHOICES = tuple(LayerBits(b, b) for b in (2, 4, 8))


def evidence_of(case: Case, journal: Journal | None = None) -> Evidence:
    sites = SiteWidths(LayerBits(8, 8), 4)
    fits = FitCache(case.model, case.graph, MinMax(), case.stats, sites)
    return Evidence(case.model, case.graph, fits, case.samples, journal=journal or Journal())


def test_the_nuclear_norm_is_the_sum_of_singular_values() -> None:
    # singular values by hand: 3 and 4 on a diagonal; a matrix of ones has one, its Frobenius norm
    diagonal = torch.tensor([[3.0, 0.0], [0.0, -4.0]])
    assert nuclear_norms(torch.stack([diagonal, torch.ones(2, 2)])).tolist() == pytest.approx(
        [7.0, 2.0]
    )


def test_a_module_is_the_attention_or_the_mlp_of_a_block(case: Case) -> None:
    modules = modules_of(evidence_of(case))
    assert len(modules) == 2 * len(case.graph.blocks)
    for module in modules:
        roles = [layer.role for layer in module.layers]
        attends = roles == [LayerRole.QKV, LayerRole.PROJ]
        assert attends or roles == [LayerRole.FC1, LayerRole.FC2]
        assert len({layer.block for layer in module.layers}) == 1
        assert [site.kind for site in module.products] == (["qk", "av"] if attends else [])
        assert module.host == case.graph.blocks[module.layers[0].block]


def outputs_of(model: nn.Module, case: Case, names: list[str], pre: bool = False) -> list[Tensor]:
    """Outputs, or first inputs, of the named modules on the samples."""
    seen: dict[str, Tensor] = {}
    handles = [
        model.get_submodule(n).register_forward_hook(
            lambda _m, a, y, n=n: seen.__setitem__(n, a[0] if pre else y)
        )
        for n in names
    ]
    with torch.no_grad():
        model(case.samples.images)
    for handle in handles:
        handle.remove()
    return [seen[name] for name in names]


def test_the_cost_of_a_module_is_norm_times_error_with_all_its_sites_quantized(case: Case) -> None:
    evidence = evidence_of(case)
    found = NuclearNorm()(evidence, CHOICES)
    table = found.table
    rows = {layer.name: i for i, layer in enumerate(table.layers)}
    images = len(case.samples)
    for module in modules_of(evidence):
        last = module.names[-1]
        maps = [site.name for site in module.products if site.kind == "av"]
        if maps:
            (softmax,) = outputs_of(case.model, case, maps, pre=True)
            singular = torch.linalg.svdvals(softmax)
            norm = float(singular.sum(dim=-1).mean())
        else:
            (output,) = outputs_of(case.model, case, [last])
            tokens = output.reshape(images, -1, output.shape[-1])
            norm = float(sum(torch.linalg.svdvals(one).sum() for one in tokens) / images)
        bits = CHOICES[1]
        fits = [evidence.fits.layer(name, bits) for name in module.names]
        products = [evidence.fits.matmul(site, 4, 4) for site in module.products]
        quantized = assemble(case.model, fits, products)
        exact, rough = (outputs_of(m, case, [last])[0] for m in (case.model, quantized))
        error = float((rough - exact).square().sum()) / images
        cost = sum(table.cost[rows[name], 1] for name in module.names)
        assert cost == pytest.approx(norm * error, rel=1e-3)
        assert found.details["nuclear_norm"][last] == pytest.approx(norm, rel=1e-4)


def test_layers_of_a_module_share_one_width_and_an_equal_part_of_the_cost(case: Case) -> None:
    table = NuclearNorm()(evidence_of(case), CHOICES).table
    assert table.groups == tuple(module.names for module in modules_of(evidence_of(case)))
    plan = allocate_ilp(table, Budget(4.1)).plan
    rows = {layer.name: i for i, layer in enumerate(table.layers)}
    for first, second in table.groups:
        assert plan[first] == plan[second]
        assert np.array_equal(table.cost[rows[first]], table.cost[rows[second]])


def test_costs_fall_with_the_width(case: Case) -> None:
    cost = NuclearNorm()(evidence_of(case), CHOICES).table.cost
    assert (cost[:, 0] > cost[:, 1]).all()
    assert (cost[:, 1] > cost[:, 2]).all()
    assert (cost > 0).all()


def test_an_attention_without_known_products_takes_the_norm_of_its_output(vit: Case) -> None:
    evidence = evidence_of(vit)
    bare = replace(evidence, graph=replace(vit.graph, matmuls=()))
    found = NuclearNorm()(bare, CHOICES[:1])
    (output,) = outputs_of(vit.model, vit, ["blocks.0.attn.proj"])
    expected = float(torch.linalg.svdvals(output).sum(dim=-1).mean())
    assert found.details["nuclear_norm"]["blocks.0.attn.qkv"] == pytest.approx(expected, rel=1e-4)


def test_images_are_bounded(vit: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[int] = []
    monkeypatch.setattr(
        "lampq.metrics.nuclear.nuclear_norms",
        lambda some: (passed.append(len(some)), some.sum(dim=(-1, -2)).abs())[1],
    )
    NuclearNorm(images=2)(evidence_of(vit), CHOICES[:1])
    assert set(passed) == {2}


def test_a_journal_saves_the_work(vit: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal()
    first = NuclearNorm()(evidence_of(vit, journal), CHOICES).table.cost
    monkeypatch.setattr(NuclearNorm, "_measure", lambda *_: pytest.fail("measured again"))
    assert np.array_equal(first, NuclearNorm()(evidence_of(vit, journal), CHOICES).table.cost)


def test_the_float_model_keeps_no_hook(vit: Case) -> None:
    NuclearNorm()(evidence_of(vit), CHOICES[:1])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in vit.model.modules())
