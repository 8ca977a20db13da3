from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lampq.methods.compensate import DAMPING, compensated_codes
from lampq.methods.minmax import per_row, per_tensor
from lampq.quant.uniform import UniformQuantizer

TOKENS, CHANNELS, OUTPUTS = 300, 70, 9


def _layer(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, bias, and inputs with correlated channels."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(CHANNELS, CHANNELS, generator=generator) / CHANNELS**0.5
    inputs = torch.randn(TOKENS, CHANNELS, generator=generator) @ mixing + 0.3
    weight = torch.randn(OUTPUTS, CHANNELS, generator=generator)
    return weight, torch.randn(OUTPUTS, generator=generator), inputs


def _orthogonal_inputs() -> Tensor:
    """Inputs whose centred columns are orthogonal: the Gram matrix is diagonal."""
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn(TOKENS, CHANNELS, generator=generator, dtype=torch.float64)
    columns = torch.linalg.qr(draw - draw.mean(0)).Q
    return columns * torch.linspace(1, 5, CHANNELS, dtype=torch.float64)


@pytest.mark.parametrize("bits", range(1, 9))
def test_a_diagonal_gram_matrix_gives_round_to_nearest(bits: int) -> None:
    weight, bias, _ = (tensor.double() for tensor in _layer(0))
    inputs = _orthogonal_inputs()
    grid = per_row(weight, bits)
    codes, _ = compensated_codes(weight, bias, inputs, inputs, grid)
    assert torch.equal(codes.int(), grid.encode(weight))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("bits", [2, 3, 4, 6])
def test_the_output_error_is_below_that_of_round_to_nearest(bits: int, seed: int) -> None:
    weight, bias, inputs = _layer(seed)
    quantized = per_tensor(inputs, bits)(inputs)
    grid = per_row(weight, bits)
    exact = inputs @ weight.T + bias
    codes, moved = compensated_codes(weight, bias, inputs, quantized, grid)
    compensated = (quantized @ grid.decode(codes).T + moved - exact).square().sum()
    nearest = (quantized @ grid(weight).T + bias - exact).square().sum()
    assert float(compensated) < float(nearest)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("bits", [2, 3, 4, 6])
def test_rounding_alone_is_made_up_for_where_the_input_is_exact(bits: int, seed: int) -> None:
    weight, bias, inputs = _layer(seed)
    inputs = inputs - inputs.mean(0)  # nothing is left for the bias to do
    grid = per_row(weight, bits)
    codes, _ = compensated_codes(weight, bias, inputs, inputs, grid)
    compensated, nearest = (
        float((inputs @ (decoded - weight).T).square().sum())
        for decoded in (grid.decode(codes), grid(weight))
    )
    assert compensated < nearest


@pytest.mark.parametrize("seed", range(3))
def test_fine_weights_come_close_to_the_least_squares_fit_of_a_coarse_input(seed: int) -> None:
    weight, bias, inputs = (tensor.double() for tensor in _layer(seed))
    quantized = per_tensor(inputs, 3)(inputs)
    grid = per_row(weight * 1.5, 8)  # room for the weights to move
    codes, moved = compensated_codes(weight, bias, inputs, quantized, grid)
    exact = inputs @ weight.T + bias
    affine = torch.cat([quantized, torch.ones(TOKENS, 1)], dim=1)
    least = (affine @ torch.linalg.lstsq(affine, exact).solution - exact).square().sum()
    unmoved = ((quantized - inputs) @ weight.T).square().sum()
    compensated = (quantized @ grid.decode(codes).T + moved - exact).square().sum()
    assert float(least) <= float(compensated) < 1.1 * float(least)
    assert float(compensated) < 0.9 * float(unmoved)


def _one_by_one(weight: Tensor, gram: Tensor, grid: UniformQuantizer) -> Tensor:
    """Optimal Brain Quantization (Frantar & Alistarh, NeurIPS 2022, eq. 2 and 3), fixed order.

    The rounding error of a column moves to the free ones by its row of the inverse Hessian, from
    which the column is then eliminated.
    """
    W, inverse = weight.clone(), torch.linalg.inv(gram)  # noqa: N806
    codes = torch.zeros_like(W)
    for j in gram.diagonal().argsort(descending=True).tolist():
        column = W[:, j : j + 1]
        codes[:, j] = grid.encode(column)[:, 0]
        error = (column - grid(column)) / inverse[j, j]
        W = W - error * inverse[j]  # noqa: N806
        inverse = inverse - torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return codes.int()


@pytest.mark.parametrize("bits", [2, 4])
def test_codes_are_those_of_rounding_one_column_after_the_other(bits: int) -> None:
    weight, bias, inputs = (tensor.double() for tensor in _layer(7))
    centred = inputs - inputs.mean(0)
    gram = centred.T @ centred
    damped = gram + DAMPING * gram.diagonal().mean() * torch.eye(CHANNELS)
    grid = per_row(weight, bits)
    codes, _ = compensated_codes(weight, bias, inputs, inputs, grid)
    assert torch.equal(codes.int(), _one_by_one(weight, damped, grid))


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_stay_in_range(bits: int) -> None:
    weight, bias, inputs = _layer(1)
    grid = per_row(weight, bits)
    codes, _ = compensated_codes(weight, bias, inputs, per_tensor(inputs, bits)(inputs), grid)
    assert int(codes.min()) >= 0
    assert int(codes.max()) < 2**bits


@pytest.mark.parametrize("bits", [1, 3, 8])
def test_the_bias_makes_the_mean_output_exact(bits: int) -> None:
    weight, bias, inputs = (tensor.double() for tensor in _layer(2))
    quantized = per_tensor(inputs, bits)(inputs)
    grid = per_row(weight, bits)
    codes, moved = compensated_codes(weight, bias, inputs, quantized, grid)
    mean = (quantized @ grid.decode(codes).T + moved).mean(0)
    torch.testing.assert_close(mean, (inputs @ weight.T + bias).mean(0))


def test_the_order_of_the_channels_does_not_matter() -> None:
    weight, bias, inputs = (tensor.double() for tensor in _layer(3))
    quantized = per_tensor(inputs, 4)(inputs)
    grid = per_row(weight, 3)
    shuffled = torch.randperm(CHANNELS, generator=torch.Generator().manual_seed(0))
    codes, moved = compensated_codes(weight, bias, inputs, quantized, grid)
    other, other_moved = compensated_codes(
        weight[:, shuffled], bias, inputs[:, shuffled], quantized[:, shuffled], grid
    )
    assert torch.equal(codes[:, shuffled], other)
    torch.testing.assert_close(moved, other_moved)


def test_a_channel_that_is_always_zero_does_no_harm() -> None:
    weight, bias, inputs = _layer(4)
    inputs[:, 5] = 0
    grid = per_row(weight, 3)
    codes, moved = compensated_codes(weight, bias, inputs, inputs, grid)
    assert bool(torch.isfinite(moved).all())
    assert int(codes.max()) < 8


def test_fewer_tokens_than_channels_are_enough() -> None:
    weight, bias, inputs = _layer(5)
    grid = per_row(weight, 3)
    few = inputs[:10]
    codes, moved = compensated_codes(weight, bias, few, few, grid)
    exact = few @ weight.T + bias
    compensated = (few @ grid.decode(codes).T + moved - exact).square().sum()
    nearest = (few @ grid(weight).T + bias - exact).square().sum()
    assert float(compensated) < float(nearest)


def test_quantized_inputs_that_never_change_leave_the_mean_output_exact() -> None:
    weight, bias, inputs = _layer(6)
    grid = per_row(weight, 3)
    quantized = torch.full_like(inputs, 0.5)
    codes, moved = compensated_codes(weight, bias, inputs, quantized, grid)
    mean = (quantized @ grid.decode(codes).T + moved).mean(0)
    torch.testing.assert_close(mean, (inputs @ weight.T + bias).mean(0), rtol=1e-4, atol=1e-4)


def test_a_token_counts_as_often_as_its_share_says() -> None:
    weight, bias, inputs = (tensor.double() for tensor in _layer(5))
    quantized = inputs + 0.1 * inputs.roll(1, dims=0)  # no two channels of equal size
    grid = per_row(weight, 3)
    times = torch.arange(TOKENS) % 3  # a third of them not at all
    shares = times.double() / times.double().mean()
    codes, moved = compensated_codes(weight, bias, inputs, quantized, grid, shares)
    often = torch.repeat_interleave(torch.arange(TOKENS), times)
    expected, expected_moved = compensated_codes(
        weight, bias, inputs[often], quantized[often], grid
    )
    assert torch.equal(codes, expected)
    torch.testing.assert_close(moved, expected_moved)
