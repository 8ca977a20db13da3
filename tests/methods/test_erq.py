from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from lampq.calibrate import LayerStats
from lampq.methods.base import LinearView, layer_output
from lampq.methods.erq import ERQ, refine_rounding, refit_to_input, rounded_by_halves, with_ones
from lampq.methods.minmax import per_row, per_tensor
from lampq.methods.repq import RepQ
from lampq.types import LayerBits, LayerRole, LayerSpec

CHANNELS, OUTPUTS = 37, 12
PROJ = LayerSpec("b.attn.proj", LayerRole.PROJ, 0, 0)
QKV = LayerSpec("b.attn.qkv", LayerRole.QKV, 0, 0, norm="b.norm1")
PATCHES = LayerSpec("patch_embed.proj", LayerRole.PATCH_EMBED, -1, 0)
seeds = pytest.mark.parametrize("seed", range(3))


def _layer(seed: int, tokens: int = 400) -> tuple[Tensor, Tensor]:
    """Weights with the bias in the last column, and correlated inputs."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(CHANNELS, CHANNELS, generator=generator) / CHANNELS**0.5
    inputs = torch.randn(tokens, CHANNELS, generator=generator) @ mixing + 0.3
    return torch.randn(OUTPUTS, CHANNELS + 1, generator=generator).double(), inputs


def _problem(seed: int, bits: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, exact output, and quantized inputs with the column of ones."""
    weight, inputs = _layer(seed)
    quantized = with_ones(per_tensor(inputs, bits)(inputs))
    return weight, with_ones(inputs) @ weight.T, quantized


def _error(weight: Tensor, exact: Tensor, quantized: Tensor) -> float:
    return float((quantized @ weight.T - exact).square().sum())


@seeds
def test_less_ridge_never_gives_more_output_error(seed: int) -> None:
    weight, exact, quantized = _problem(seed)
    errors = [
        _error(refit_to_input(weight, exact, quantized, penalty), exact, quantized)
        for penalty in (1e9, 1e4, 1e2, 1.0, 1e-2, 1e-6)
    ]
    assert errors[0] == pytest.approx(_error(weight, exact, quantized), rel=1e-4)
    assert all(a > b for a, b in pairwise(errors))
    least = torch.linalg.lstsq(quantized, exact).solution.T
    assert errors[-1] == pytest.approx(_error(least, exact, quantized), rel=1e-6)


def test_the_refit_is_the_minimum_of_error_and_move() -> None:
    weight, exact, quantized = _problem(0)
    moved = refit_to_input(weight, exact, quantized, 50.0).requires_grad_()
    loss = (quantized @ moved.T - exact).square().sum() + 50.0 * (moved - weight).square().sum()
    (gradient,) = torch.autograd.grad(loss, moved)
    assert float(gradient.abs().max()) < 1e-8 * loss.item()


def _rounding(seed: int, bits: int = 3) -> tuple[Tensor, Tensor, Tensor, object]:
    weight, inputs = _layer(seed)
    grid = per_row(weight[:, :-1].float(), bits)
    x = inputs.double()
    return weight[:, :-1], x.T @ x, grid.encode(weight[:, :-1].float()).double(), grid


def _rounding_errors(codes: Tensor, weight: Tensor, grid, gram: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    error = (codes - grid.zero.double()) * grid.scale.double() - weight
    return (error @ gram * error).sum(dim=1)


@seeds
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_turning_roundings_over_lowers_the_error_of_rows_and_never_raises_it(
    seed: int, bits: int
) -> None:
    weight, gram, nearest, grid = _rounding(seed, bits)
    before = _rounding_errors(nearest, weight, grid, gram)
    errors = [before]
    for sweeps in (1, 2, 10, 100):
        codes = refine_rounding(nearest, weight, grid, gram, sweeps)  # type: ignore[arg-type]
        assert int(codes.min()) >= 0
        assert int(codes.max()) < 2**bits
        errors.append(_rounding_errors(codes, weight, grid, gram))
    assert all(bool((b <= a * (1 + 1e-9)).all()) for a, b in pairwise(errors))
    assert float(errors[-1].sum()) < 0.9 * float(before.sum())


def test_turned_roundings_go_to_the_other_neighbour_only() -> None:
    weight, gram, nearest, grid = _rounding(0)
    codes = refine_rounding(nearest, weight, grid, gram, 100)  # type: ignore[arg-type]
    exact = weight / grid.scale.double() + grid.zero.double()  # type: ignore[attr-defined]
    changed = codes != nearest
    assert bool(changed.any())
    assert bool(((codes - exact).abs() < 1)[changed].all())


def test_two_columns_that_go_together_are_rounded_apart() -> None:
    # both weights lie at 0.4 steps: rounded down their errors add up, one up and one down cancel
    grid = per_row(torch.tensor([[0.0, 3.0]]), 2)
    weight = torch.tensor([[1.4, 1.4]]).double()
    gram = torch.tensor([[1.0, 0.99], [0.99, 1.0]]).double()
    codes = refine_rounding(torch.tensor([[1.0, 1.0]]).double(), weight, grid, gram, 100)
    best = min(
        product((1.0, 2.0), repeat=2),
        key=lambda pair: float(
            (torch.tensor(pair) - weight) @ gram @ (torch.tensor(pair) - weight).T
        ),
    )
    assert sorted(codes[0].tolist()) == sorted(best) == [1.0, 2.0]


@seeds
@pytest.mark.parametrize("bits", [2, 4])
def test_each_step_lowers_the_output_error(seed: int, bits: int) -> None:
    weight, exact, quantized = _problem(seed, bits)
    grid = per_row(weight[:, :-1].float(), bits)
    gram = quantized.T @ quantized

    def rounded(start: Tensor, penalty: float, sweeps: int) -> float:
        codes, bias = rounded_by_halves(start, gram, grid, penalty, sweeps)
        decoded = (codes - grid.zero.double()) * grid.scale.double()
        return _error(torch.cat([decoded, bias[:, None]], dim=1), exact, quantized)

    nearest = rounded(weight, 1e12, 0)
    refitted = refit_to_input(weight, exact, quantized, 10.0)
    errors = [
        nearest,
        rounded(refitted, 1e12, 0),
        rounded(refitted, 1e12, 100),
        rounded(refitted, 10.0, 100),
    ]
    if bits > 2:  # at two bits the first step alone is lost in the rounding
        assert errors[1] < errors[0]
    assert errors[2] < errors[1]
    assert errors[3] < errors[2]


def test_a_large_ridge_without_sweeps_is_round_to_nearest() -> None:
    weight, _, quantized = _problem(0)
    grid = per_row(weight[:, :-1].float(), 3)
    codes, bias = rounded_by_halves(weight, quantized.T @ quantized, grid, 1e15, 0)
    assert torch.equal(codes.int(), grid.encode(weight[:, :-1].float()))
    torch.testing.assert_close(bias, weight[:, -1])


@seeds
@pytest.mark.parametrize("spec", [PROJ, QKV, PATCHES], ids=["plain", "folded", "patches"])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_output_is_closer_than_that_of_repq(seed: int, spec: LayerSpec, bits: int) -> None:
    weight, inputs = _layer(seed)
    view = LinearView(spec, weight[:, :-1].float(), weight[:, -1].float())
    exact = inputs @ view.weight.T + view.bias
    compensated, plain = (
        float(
            (layer_output(method.fit(view, LayerBits(bits, 4), LayerStats(inputs)), inputs) - exact)
            .square()
            .sum()
        )
        for method in (ERQ(), RepQ())
    )
    assert compensated < plain


def test_the_fit_does_not_depend_on_how_often_the_tokens_are_repeated() -> None:
    weight, inputs = _layer(0)
    inputs = inputs.clamp(-1, 1)  # so that the percentiles are the same too
    view = LinearView(PROJ, weight[:, :-1].float(), weight[:, -1].float())
    once = ERQ().fit(view, LayerBits(3, 3), LayerStats(inputs))
    again = ERQ().fit(view, LayerBits(3, 3), LayerStats(inputs.repeat(4, 1)))
    assert torch.equal(once.codes, again.codes)
    torch.testing.assert_close(once.bias, again.bias)


def test_the_input_of_the_patch_embedding_stays_in_float() -> None:
    weight, inputs = _layer(0)
    view = LinearView(PATCHES, weight[:, :-1].float(), weight[:, -1].float())
    assert ERQ().fit(view, LayerBits(4, 4), LayerStats(inputs)).input_quantizer is None
