from __future__ import annotations

import pytest
import torch
from conftest import Case

from lampq.methods.base import LinearView
from lampq.methods.minmax import MinMax, per_row, per_tensor
from lampq.methods.mse import MSE, POWER, of_rows, of_tensor
from lampq.quant.uniform import UniformQuantizer
from lampq.types import LayerBits


def error(grid: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (grid(x) - x).abs().pow(POWER).flatten(1).sum(dim=1)


@pytest.mark.parametrize("bits", range(1, 9))
def test_no_row_has_a_larger_error_than_between_its_extremes(bits: int) -> None:
    x = torch.randn(20, 300, generator=torch.Generator().manual_seed(0))
    whole = torch.cat([x, torch.zeros(20, 1)], dim=1)  # a range with zero in it
    assert bool((error(of_rows(x, bits), whole) <= error(per_row(whole, bits), whole)).all())


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_one_enormous_value_does_not_drown_the_others(sign: float) -> None:
    x = torch.randn(1, 40_000, generator=torch.Generator().manual_seed(1))
    x[0, 17] = 40 * sign
    others = torch.arange(x.shape[1]) != 17
    found, extremes = of_tensor(x, 4)(x), per_tensor(x, 4)(x)
    assert float((found - x)[0, others].norm()) < 0.5 * float((extremes - x)[0, others].norm())


def test_the_ends_of_a_lopsided_row_are_drawn_in_apart() -> None:
    x = torch.cat([torch.tensor([-4.0]), torch.linspace(0, 1, 4000)])[None]
    drawn_in_together = [
        error(UniformQuantizer.between(4, -4 * share, 1.0 * share, whole=True), x)
        for share in torch.linspace(0.02, 1, 50)
    ]
    assert float(error(of_rows(x, 4), x)) < 0.9 * float(min(drawn_in_together))


def test_zero_stays_zero() -> None:
    x = torch.rand(6, 50, generator=torch.Generator().manual_seed(2)) + 1
    for bits in range(2, 9):
        zeros = torch.zeros(6, 1)
        assert torch.equal(of_rows(x, bits)(zeros), zeros)


def test_a_tensor_of_zeros_stays_finite() -> None:
    assert torch.equal(of_tensor(torch.zeros(3, 4), 3)(torch.zeros(3, 4)), torch.zeros(3, 4))


def test_weights_are_closer_than_between_their_extremes(vit: Case) -> None:
    for spec in vit.graph.layers:
        view, stats = LinearView.of(vit.model, spec), vit.stats[spec.name]
        own, plain = (method.fit(view, LayerBits(3, 3), stats) for method in (MSE(), MinMax()))
        assert torch.equal(own.codes.int(), own.weight_quantizer.encode(view.weight))
        assert float((own.weight - view.weight).norm()) < float((plain.weight - view.weight).norm())
