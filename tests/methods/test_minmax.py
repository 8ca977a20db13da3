from __future__ import annotations

import pytest
import torch
from conftest import Case

from lampq.methods.base import LinearView, layer_output
from lampq.methods.minmax import MinMax, per_row, per_tensor
from lampq.types import LayerBits


def test_every_row_of_a_weight_has_its_own_grid() -> None:
    weight = torch.tensor([[0.0, 3.0], [-6.0, 0.0]])
    grid = per_row(weight, 2)
    assert grid.scale.tolist() == [[1.0], [2.0]]
    assert grid.zero.tolist() == [[0.0], [3.0]]
    assert torch.equal(grid(weight), weight)


def test_one_bit_is_the_pair_of_extremes() -> None:
    weight = torch.tensor([[-1.0, 0.9, 1.1, 3.0]])
    torch.testing.assert_close(per_row(weight, 1)(weight), torch.tensor([[-1.0, -1.0, 3.0, 3.0]]))


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_error_of_a_tensor_is_at_most_a_step(bits: int) -> None:
    x = torch.randn(500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    step = float(x.max() - x.min()) / (2**bits - 1)
    # half a step of rounding, and half of the whole zero point at the ends
    assert float((per_tensor(x, bits)(x) - x).abs().max()) <= step * (1 + 1e-9)


def test_weight_codes_are_the_nearest_ones(vit: Case) -> None:
    for spec in vit.graph.layers:
        view = LinearView.of(vit.model, spec)
        fit = MinMax().fit(view, LayerBits(3, 3), vit.stats[spec.name])
        assert torch.equal(fit.codes.int(), fit.weight_quantizer.encode(view.weight))


def test_nothing_is_folded_and_the_bias_stays(vit: Case) -> None:
    for spec in vit.graph.layers:
        view = LinearView.of(vit.model, spec)
        fit = MinMax().fit(view, LayerBits(3, 3), vit.stats[spec.name])
        assert fit.fold is None
        assert torch.equal(fit.bias, view.bias)


def test_pictures_keep_eight_bits(vit: Case) -> None:
    spec = vit.graph.layer("patch_embed.proj")
    fit = MinMax().fit(LinearView.of(vit.model, spec), LayerBits(2, 2), vit.stats[spec.name])
    assert fit.input_quantizer is not None
    assert fit.input_quantizer.bits == 8


def test_eight_bits_are_close_to_float(case: Case) -> None:
    for spec in case.graph.layers:
        view, stats = LinearView.of(case.model, spec), case.stats[spec.name]
        exact = stats.inputs @ view.weight.T + view.bias
        error = layer_output(MinMax().fit(view, LayerBits(8, 8), stats), stats.inputs) - exact
        assert float(error.norm() / exact.norm()) < 0.03
