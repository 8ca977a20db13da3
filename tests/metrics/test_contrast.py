from __future__ import annotations

import numpy as np
import pytest

from lampq.metrics.contrast import with_contrast
from lampq.types import CostTable, LayerBits, LayerRole, LayerSpec

HEAD = LayerSpec("head", LayerRole.HEAD, -1, 50)
TWO, FOUR = LayerBits(2, 2), LayerBits(4, 4)
BLOCKS = tuple(
    LayerSpec(f"{block}.{name}", LayerRole.QKV, block, 10) for block in (0, 1) for name in "ab"
)


def _in_blocks(*costs: tuple[float, float]) -> CostTable:
    return CostTable(BLOCKS, (TWO, FOUR), np.array(costs))


def test_contrast_is_a_power_of_the_differences_between_blocks() -> None:
    # geometric means of 16 and 1; of all, 4
    table = _in_blocks((32.0, 16.0), (16.0, 8.0), (2.0, 1.0), (1.0, 0.5))
    even = with_contrast(table, 0)
    np.testing.assert_allclose(even.cost, [[8, 4], [4, 2], [8, 4], [4, 2]])
    half = with_contrast(table, 0.5)
    np.testing.assert_allclose(half.cost, [[16, 8], [8, 4], [4, 2], [2, 1]])
    assert with_contrast(table, 1) is table


def test_contrast_leaves_alone_what_has_no_geometric_mean() -> None:
    table = _in_blocks((8.0, 2.0), (-1.0, 0.0), (1.0, 1.0), (0.0, 1.0))
    even = with_contrast(table, 0).cost
    assert even[0, 0] / even[0, 1] == pytest.approx(4)
    assert (even[1, 1], even[3, 0]) == (0, 0)
    assert np.sqrt(even[0, 0] * even[0, 1]) == pytest.approx(even[2, 0])
    assert even[1, 0] < 0
    nothing = _in_blocks((0.0, 0.0), (0.0, 0.0), (-1.0, 0.0), (0.0, 0.0))
    np.testing.assert_array_equal(with_contrast(nothing, 0).cost, nothing.cost)


def test_layers_outside_the_blocks_keep_their_costs() -> None:
    table = CostTable((*BLOCKS[1:3], HEAD), (TWO,), np.array([[4.0], [1.0], [9.0]]))
    np.testing.assert_allclose(with_contrast(table, 0).cost[:, 0], [2, 2, 9])
