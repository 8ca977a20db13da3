from __future__ import annotations

import pytest
import torch
from conftest import Case, same_fit, same_quantizer
from torch import Tensor

from lampq.calibrate import LayerStats
from lampq.methods.base import LinearView, layer_output
from lampq.methods.compensate import damp
from lampq.methods.gptq import GPTQ, hessian
from lampq.methods.repq import RepQ
from lampq.types import LayerBits, LayerRole, LayerSpec

PROJ = LayerSpec("b.attn.proj", LayerRole.PROJ, 0, 0)
QKV = LayerSpec("b.attn.qkv", LayerRole.QKV, 0, 0, norm="b.norm1")
orders = pytest.mark.parametrize("act_order", [False, True], ids=["left-to-right", "act-order"])


def _layer(spec: LayerSpec, seed: int, channels: int = 40) -> tuple[LinearView, LayerStats]:
    """A layer with correlated inputs."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(channels, channels, generator=generator) / channels**0.5
    inputs = torch.randn(500, channels, generator=generator) @ mixing + 0.3
    weight = torch.randn(24, channels, generator=generator)
    return LinearView(spec, weight, torch.randn(24, generator=generator)), LayerStats(inputs)


@orders
@pytest.mark.parametrize("bits", range(1, 9))
def test_a_diagonal_hessian_gives_round_to_nearest(bits: int, act_order: bool) -> None:
    view, _ = _layer(PROJ, 0, channels=16)
    # each token has one channel: the quantized inputs of two channels never meet
    size = torch.linspace(0.5, 3, 16)
    inputs = torch.cat([torch.diag(size), torch.diag(-size)])
    stats = LayerStats(inputs)
    gram = hessian(GPTQ()._repq.input_of(view, LayerBits(bits, 8), stats).quantized())
    assert torch.equal(gram, torch.diag(gram.diagonal()))
    nearest = RepQ().fit(view, LayerBits(bits, 8), stats)
    assert same_fit(GPTQ(act_order=act_order).fit(view, LayerBits(bits, 8), stats), nearest)


@orders
@pytest.mark.parametrize("spec", [PROJ, QKV], ids=["plain", "folded"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_output_on_quantized_inputs_changes_less_than_by_rounding_to_nearest(
    bits: int, seed: int, spec: LayerSpec, act_order: bool
) -> None:
    view, stats = _layer(spec, seed)
    widths = LayerBits(bits, 4)
    given = RepQ().input_of(view, widths, stats)
    spread, nearest = (
        float((given.quantized() @ (fit.weight - given.weight).T).square().sum())
        for fit in (
            GPTQ(act_order=act_order).fit(view, widths, stats),
            RepQ().fit(view, widths, stats),
        )
    )
    assert spread < nearest


def test_grid_input_and_fold_are_those_of_repq(vit: Case) -> None:
    for name in ("patch_embed.proj", "blocks.0.attn.qkv", "blocks.0.mlp.fc2"):
        view = LinearView.of(vit.model, vit.graph.layer(name))
        fit, base = (
            method.fit(view, LayerBits(3, 4), vit.stats[name]) for method in (GPTQ(), RepQ())
        )
        assert same_quantizer(fit.input_quantizer, base.input_quantizer)
        assert same_quantizer(fit.weight_quantizer, base.weight_quantizer)
        assert torch.equal(fit.bias, base.bias)
        assert (fit.fold is None) == (base.fold is None)


def test_the_hessian_is_that_of_the_mean_squared_output_error() -> None:
    x = torch.randn(30, 5, generator=torch.Generator().manual_seed(0)).double()

    def loss(row: Tensor) -> Tensor:
        return (x @ row).square().mean()

    exact = torch.autograd.functional.hessian(loss, torch.zeros(5).double())
    torch.testing.assert_close(hessian(x), exact)


def test_the_damping_is_a_share_of_the_mean_diagonal() -> None:
    gram = torch.diag(torch.tensor([1.0, 3.0]))
    torch.testing.assert_close(damp(gram, 0.01), torch.diag(torch.tensor([1.02, 3.02])))


def test_more_damping_comes_closer_to_round_to_nearest() -> None:
    view, stats = _layer(PROJ, 1)
    nearest = RepQ().fit(view, LayerBits(3, 4), stats).codes
    far, near = (
        int((GPTQ(damping=damping).fit(view, LayerBits(3, 4), stats).codes != nearest).sum())
        for damping in (0.01, 1e4)
    )
    assert near == 0 < far


@orders
def test_a_channel_that_is_always_zero_gets_no_weight(act_order: bool) -> None:
    view, stats = _layer(PROJ, 2)
    stats.inputs[:, [3, 7]] = 0
    fit = GPTQ(act_order=act_order).fit(view, LayerBits(4, 4), stats)
    assert torch.equal(fit.weight[:, [3, 7]], torch.zeros(24, 2))
    assert bool(torch.isfinite(layer_output(fit, stats.inputs)).all())
