from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import Case, same_fit, same_quantizer
from torch import Tensor

from lampq.calibrate import LayerStats, MatmulStats
from lampq.methods.base import LinearView, layer_output
from lampq.methods.ptq4vit import (
    SHARES,
    SPLITS,
    PTQ4ViT,
    full_scale,
    importance,
    influential,
    shares,
    symmetric,
)
from lampq.quant.twin import TwinGeluQuantizer, TwinSoftmaxQuantizer
from lampq.quant.uniform import UniformQuantizer
from lampq.types import LayerBits, LayerRole, LayerSpec, MatmulSpec

PROJ = LayerSpec("b.attn.proj", LayerRole.PROJ, 0, 0)
QKV = LayerSpec("b.attn.qkv", LayerRole.QKV, 0, 0)
FC2 = LayerSpec("b.mlp.fc2", LayerRole.FC2, 0, 0)
PATCHES = LayerSpec("patch_embed.proj", LayerRole.PATCH_EMBED, -1, 0)
FOUR = LayerBits(4, 4)


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _layer(spec: LayerSpec, outputs: int = 12) -> tuple[LinearView, LayerStats]:
    view = LinearView(spec, _draw(outputs, 10), _draw(outputs, seed=1))
    return view, LayerStats(_draw(200, 10, seed=2), _draw(200, outputs, seed=3))


def _weighted_error(fit, view: LinearView, stats: LayerStats) -> float:  # type: ignore[no-untyped-def]
    exact = stats.inputs @ view.weight.T + view.bias
    return float(((layer_output(fit, stats.inputs) - exact) * stats.gradients).square().sum())


def test_the_candidates_are_the_published_shares() -> None:
    assert len(SHARES) == 100
    assert SHARES[0] == pytest.approx(0.01)
    assert SHARES[99] == pytest.approx(0.01 + 99 * 0.0119)
    assert shares(100) == SHARES
    assert len(shares(20)) == 20
    assert set(shares(20)) <= set(SHARES)
    assert [SPLITS[0], SPLITS[19]] == [1.0, 2.0**-19]


@pytest.mark.parametrize("bits", range(2, 9))
def test_a_symmetric_grid_holds_zero_and_one_negative_value_more(bits: int) -> None:
    codes = torch.arange(2**bits)
    values = symmetric(bits, torch.tensor(1.0)).decode(codes)
    assert values.tolist() == list(range(-(2 ** (bits - 1)), 2 ** (bits - 1)))


def test_at_one_bit_the_levels_are_plus_and_minus_the_largest() -> None:
    grid = symmetric(1, full_scale(torch.tensor(0.7), 1))
    assert grid(torch.tensor([0.6, -0.1])).tolist() == pytest.approx([0.7, -0.7])


def test_the_weight_has_one_scale_and_qkv_three() -> None:
    for spec, groups in ((PROJ, 1), (QKV, 3), (PATCHES, 12)):
        view, stats = _layer(spec)
        # so that parts do not end up with equal scales by chance
        view = replace(view, weight=view.weight * torch.linspace(1, 2, 12)[:, None])
        scale = PTQ4ViT().fit(view, FOUR, stats).weight_quantizer.scale[:, 0]
        assert len(scale.unique()) == groups
        assert len({len(set(part.tolist())) for part in scale.view(groups, -1)}) == 1


def test_the_parts_of_qkv_are_fitted_as_if_they_were_alone() -> None:
    view, stats = _layer(QKV)
    method = PTQ4ViT(rounds=1)
    whole = method.fit(view, FOUR, stats).weight_quantizer.scale[:, 0]
    for part in range(3):
        rows = slice(4 * part, 4 * part + 4)
        alone = LinearView(PROJ, view.weight[rows], view.bias[rows])
        own = LayerStats(stats.inputs, stats.gradients[:, rows])  # type: ignore[index]
        assert float(method.fit(alone, FOUR, own).weight_quantizer.scale[0]) == float(
            whole[4 * part]
        )


def test_scales_are_shares_of_the_full_scale() -> None:
    view, stats = _layer(PROJ)
    fit = PTQ4ViT().fit(view, FOUR, stats)
    weight = float(fit.weight_quantizer.scale[0] / (view.weight.abs().max() / 7.5))
    assert fit.input_quantizer is not None
    inputs = float(fit.input_quantizer.scale / (stats.inputs.abs().max() / 7.5))
    for found in (weight, inputs):
        assert min(abs(found - share) for share in SHARES) < 1e-5


@pytest.mark.parametrize("bits", range(2, 7))
def test_no_other_candidate_for_the_input_has_less_weighted_error(bits: int) -> None:
    view, stats = _layer(PROJ)
    fit = PTQ4ViT().fit(view, LayerBits(4, bits), stats)
    found = _weighted_error(fit, view, stats)
    full = full_scale(stats.inputs.abs().max(), bits)
    others = [
        _weighted_error(replace(fit, input_quantizer=symmetric(bits, s * full)), view, stats)
        for s in SHARES
    ]
    assert found <= min(others) * (1 + 1e-5)


def test_an_output_that_matters_alone_gets_the_scale_it_needs() -> None:
    view, stats = _layer(PROJ)
    view.weight[1:] *= 20
    gradients = torch.zeros(200, 12)
    small = gradients.clone()
    small[:, 0] = 1
    large = 1 - small
    fits = [
        PTQ4ViT().fit(view, FOUR, LayerStats(stats.inputs, chosen)) for chosen in (small, large)
    ]
    # a scale for the small row alone clips the others, and the other way round loses the small row
    assert float(fits[0].weight_quantizer.scale[0]) < 0.2 * float(fits[1].weight_quantizer.scale[0])
    exact = stats.inputs @ view.weight[0] + view.bias[0]
    errors = [float((layer_output(fit, stats.inputs)[:, 0] - exact).norm()) for fit in fits]
    assert errors[0] < 0.5 * errors[1]


def test_the_size_of_the_gradients_does_not_matter() -> None:
    view, stats = _layer(PROJ)
    assert stats.gradients is not None
    small = replace(stats, gradients=stats.gradients * 1e-18)
    assert same_fit(PTQ4ViT().fit(view, FOUR, small), PTQ4ViT().fit(view, FOUR, stats))


@pytest.mark.parametrize("gradients", [None, torch.zeros(200, 12)], ids=["none", "zero"])
def test_without_gradients_all_errors_count_alike(gradients: Tensor | None) -> None:
    view, stats = _layer(PROJ)
    even = replace(stats, gradients=torch.ones(200, 12))
    fits = [
        PTQ4ViT().fit(view, FOUR, given) for given in (even, replace(stats, gradients=gradients))
    ]
    assert same_fit(*fits)


def test_the_tokens_with_the_largest_gradients_are_scored() -> None:
    inputs = torch.arange(20.0)[:, None]
    gradients = torch.zeros(20, 2)
    gradients[[3, 11, 5]] = torch.tensor([[1.0, 0], [0, -3.0], [0.1, 0.1]])
    chosen, own = influential(LayerStats(inputs, gradients), 2)
    assert chosen.flatten().tolist() == [3.0, 11.0]
    assert own is not None
    assert torch.equal(own, gradients[[3, 11]])


def test_weights_of_errors_have_a_mean_square_of_one() -> None:
    weights = importance(1e-20 * _draw(30, 4), torch.zeros(30, 4))
    assert float(weights.square().mean()) == pytest.approx(1, rel=1e-4)


def test_the_input_behind_gelu_gets_a_twin_quantizer() -> None:
    view, stats = _layer(FC2)
    inputs = torch.nn.functional.gelu(stats.inputs)
    quantizer = PTQ4ViT().fit(view, FOUR, replace(stats, inputs=inputs)).input_quantizer
    assert isinstance(quantizer, TwinGeluQuantizer)
    assert float(quantizer.low) * 8 == pytest.approx(0.16997124254703522)
    deeper = replace(stats, inputs=stats.inputs)
    quantizer = PTQ4ViT().fit(view, FOUR, deeper).input_quantizer
    assert isinstance(quantizer, TwinGeluQuantizer)
    assert float(quantizer.low) * 8 == pytest.approx(-float(stats.inputs.min()))


def test_the_input_of_the_patch_embedding_stays_in_float() -> None:
    view, stats = _layer(PATCHES)
    assert PTQ4ViT().fit(view, FOUR, stats).input_quantizer is None


def _maps() -> MatmulStats:
    left = (_draw(4, 3, 10, 10) * 2).softmax(-1)
    return MatmulStats(left, _draw(4, 3, 10, 5, seed=1), _draw(4, 3, 10, 5, seed=2))


def test_the_softmax_gets_a_twin_quantizer_with_the_best_split() -> None:
    stats = _maps()
    fit = PTQ4ViT().fit_matmul(MatmulSpec("b.attn.av", "av", 0), 4, 4, stats)
    assert isinstance(fit.left, TwinSoftmaxQuantizer)
    assert isinstance(fit.right, UniformQuantizer)
    assert fit.right.scale.numel() == 1

    def error(split: float) -> float:
        left = TwinSoftmaxQuantizer.splitting(4, torch.tensor(split))
        product = left(stats.left) @ fit.right(stats.right) - stats.left @ stats.right
        return float((product * stats.gradients).square().sum())

    once = PTQ4ViT(rounds=3).fit_matmul(MatmulSpec("b.attn.av", "av", 0), 4, 4, stats)
    assert same_quantizer(once.left, fit.left)
    best = min(SPLITS, key=error)
    assert float(fit.left.low) * 7 == pytest.approx(best)


def test_scores_get_symmetric_quantizers_with_one_scale() -> None:
    stats = MatmulStats(_draw(4, 3, 10, 5), _draw(4, 3, 5, 10, seed=1), _draw(4, 3, 10, 10, seed=2))
    fit = PTQ4ViT().fit_matmul(MatmulSpec("b.attn.qk", "qk", 0), 3, 5, stats)
    for quantizer, bits in ((fit.left, 3), (fit.right, 5)):
        assert isinstance(quantizer, UniformQuantizer)
        assert float(quantizer.zero) == 2 ** (bits - 1)


def test_gradients_are_asked_for_and_change_the_fit(vit: Case) -> None:
    assert PTQ4ViT.wants_gradients
    spec = vit.graph.layer("blocks.1.attn.proj")
    view, stats = LinearView.of(vit.model, spec), vit.stats[spec.name]
    assert isinstance(stats, LayerStats)
    with_them, without = (
        PTQ4ViT().fit(view, LayerBits(3, 3), given) for given in (stats, LayerStats(stats.inputs))
    )
    assert _weighted_error(with_them, view, stats) < _weighted_error(without, view, stats)
