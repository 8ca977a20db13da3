from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from conftest import Case, same_fit, same_quantizer
from torch import Tensor

from lampq.calibrate import BlockView, LayerStats, MatmulStats
from lampq.methods.apq import APQ, top_preserving, without_bottom
from lampq.methods.base import FitCache, LinearView, SiteWidths
from lampq.methods.ptq4vit import full_scale, input_candidates, shares, symmetric
from lampq.quant.base import Quantizer
from lampq.quant.modules import LayerFit, assemble, quantized_layer, replace_module
from lampq.quant.uniform import UniformQuantizer
from lampq.types import BitPlan, LayerBits, MatmulSpec

BITS = LayerBits(3, 3)


def _arguments(case: Case, name: str) -> tuple[LinearView, LayerStats]:
    stats = case.stats[name]
    assert isinstance(stats, LayerStats)
    return LinearView.of(case.model, case.graph.layer(name)), stats


def _block_error(view: BlockView, fit: LayerFit, share: float) -> float:
    """By hand: the error of the block with this layer quantized."""
    block = copy.deepcopy(view.module)
    name = fit.spec.name.removeprefix(f"{view.name}.")
    replace_module(block, name, quantized_layer(fit, block.get_submodule(name)))
    error = (block(*view.arguments, **view.keywords) - view.output).flatten()
    kept = error.abs().argsort()[int(share * len(error)) :]
    return float((error * view.gradient.flatten())[kept].square().sum())


def test_the_smallest_errors_are_set_to_zero() -> None:
    error = torch.tensor([[0.5, -0.1, 0.2], [-4.0, 0.3, 1.0]])
    assert without_bottom(error, 0.5).tolist() == [[0.5, 0, 0], [-4, 0, 1]]
    assert torch.equal(without_bottom(error, 0.0), error)
    assert torch.equal(without_bottom(error, 0.1), error)


@pytest.mark.parametrize("name", ["attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"])
def test_no_other_candidate_has_less_error_at_the_block_output(vit: Case, name: str) -> None:
    view, stats = _arguments(vit, f"blocks.0.{name}")
    assert stats.block is not None
    method = APQ(eliminated=0.3)
    fit = method.fit(view, BITS, stats)
    found = _block_error(stats.block, fit, 0.3)
    tried = input_candidates(view.spec.role, stats.inputs, 3, method.candidates, method.profile)
    others = [
        _block_error(stats.block, replace(fit, input_quantizer=candidate), 0.3)
        for candidate in tried
    ]
    assert found == pytest.approx(min(others), rel=1e-4)


@pytest.mark.parametrize("name", ["attn.qkv", "mlp.fc1"])
def test_swin_blocks_are_run_too(swin: Case, name: str) -> None:
    view, stats = _arguments(swin, f"layers.0.blocks.1.{name}")
    assert stats.block is not None
    at_block = APQ().fit(view, BITS, stats)
    own = APQ().fit(view, BITS, replace(stats, block=None))
    errors = [_block_error(stats.block, fit, 0.2) for fit in (at_block, own)]
    assert errors[0] <= errors[1] * 1.001


def test_the_three_parts_of_qkv_have_their_own_scales(vit: Case) -> None:
    view, stats = _arguments(vit, "blocks.0.attn.qkv")
    scale = APQ().fit(view, BITS, stats).weight_quantizer.scale.view(3, -1)
    assert bool((scale == scale[:, :1]).all())
    assert len(scale[:, 0].unique()) > 1


def test_layers_outside_the_blocks_are_scored_by_their_own_output(case: Case) -> None:
    outside = list(case.graph.fixed)
    assert len(outside) >= 2
    for spec in outside:
        view, stats = _arguments(case, spec.name)
        assert stats.block is None
        fit = APQ().fit(view, LayerBits(4, 8), stats)
        assert fit.spec == spec


def test_how_much_is_eliminated_changes_a_fit(vit: Case) -> None:
    fits = []
    for share in (0.0, 0.9):
        for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"):
            view, stats = _arguments(vit, f"blocks.0.{name}")
            fits.append(APQ(eliminated=share).fit(view, BITS, stats))
    assert not all(same_fit(a, b) for a, b in zip(fits[:4], fits[4:], strict=True))


def test_the_block_of_the_model_is_left_alone(vit: Case) -> None:
    before = {name: t.clone() for name, t in vit.model.state_dict().items()}
    modules = [type(module) for module in vit.model.modules()]
    view, stats = _arguments(vit, "blocks.0.mlp.fc1")
    APQ().fit(view, BITS, stats)
    site = vit.graph.matmuls[0]
    matmul = vit.stats[site.name]
    assert isinstance(matmul, MatmulStats)
    APQ().fit_matmul(site, 3, 3, matmul)
    assert [type(module) for module in vit.model.modules()] == modules
    assert all(torch.equal(vit.model.state_dict()[name], t) for name, t in before.items())


def test_fits_in_several_threads_are_those_in_one(vit: Case) -> None:
    plan = BitPlan.uniform(vit.graph.allocatable, BITS)
    found = []
    before = torch.get_num_threads()
    for threads in (1, 4):
        torch.set_num_threads(threads)
        try:
            cache = FitCache(vit.model, vit.graph, APQ(), vit.stats, SiteWidths(BITS, 3))
            found.append(cache.of_plan(plan))
        finally:
            torch.set_num_threads(before)
    assert all(same_fit(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert same_quantizer(one.left, other.left)
        assert same_quantizer(one.right, other.right)


def _maps(seed: int = 0) -> Tensor:
    logits = torch.randn(4, 3, 10, 10, generator=torch.Generator().manual_seed(seed))
    return (logits * torch.tensor([0.5, 2, 6]).view(1, 3, 1, 1)).softmax(-1)


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_maximum_of_every_head_is_kept_and_the_order_with_it(bits: int) -> None:
    maps = _maps()
    for quantizer in top_preserving(maps, bits, 5):
        values = quantizer(maps)
        torch.testing.assert_close(values.amax(dim=(0, 2, 3)), maps.amax(dim=(0, 2, 3)))
        for head in range(3):
            order = maps[:, head].flatten().argsort()
            assert bool((values[:, head].flatten()[order].diff() >= -1e-7).all())


def test_grids_of_the_softmax_start_between_zero_and_the_mean() -> None:
    maps = _maps()
    grids = top_preserving(maps, 4, 5)
    starts = torch.stack([grid.decode(torch.zeros(1, 1, 1)).flatten() for grid in grids])
    means = maps.mean(dim=(0, 2, 3))
    torch.testing.assert_close(starts, torch.linspace(0, 1, 5)[:, None] * means, atol=1e-6, rtol=0)


def test_the_softmax_is_uniform_per_head() -> None:
    stats = MatmulStats(_maps(), torch.randn(4, 3, 10, 5))
    left = APQ().fit_matmul(MatmulSpec("b.attn.av", "av", 0), 4, 4, stats).left
    assert isinstance(left, UniformQuantizer)
    assert left.scale.shape == (3, 1, 1)


@torch.no_grad()
@pytest.mark.parametrize("number", [0, 1], ids=["scores", "values"])
def test_no_other_right_operand_has_less_error_at_the_block_output(vit: Case, number: int) -> None:
    site = vit.graph.matmuls[number]
    stats = vit.stats[site.name]
    assert isinstance(stats, MatmulStats)
    view = stats.block
    assert view is not None
    method = APQ()
    fit = method.fit_matmul(site, 3, 3, stats)

    def error(right: Quantizer) -> float:
        block = assemble(vit.model, [], [replace(fit, right=right)]).get_submodule(view.name)
        kept = without_bottom(block(*view.arguments, **view.keywords) - view.output, 0.2)
        return float((kept * view.gradient).square().sum())

    full = full_scale(stats.right.abs().max(), 3)
    others = [error(symmetric(3, share * full)) for share in shares(method.candidates)]
    assert error(fit.right) == pytest.approx(min(others), rel=1e-5)
