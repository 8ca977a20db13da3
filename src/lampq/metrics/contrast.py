"""How much of the differences between blocks counts in the costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lampq.types import CostTable


def with_contrast(table: CostTable, share: float) -> CostTable:
    """The table with the differences between blocks to that power.

    A block stands for its geometric mean. With 0 all blocks have the same, with 1 nothing changes.
    Layers outside the blocks, blocks without a positive cost, and costs of zero stay as they are.
    """
    if share == 1:
        return table
    blocks = np.array([layer.block for layer in table.layers])
    logs = np.log(np.where(table.cost > 0, table.cost, np.nan))
    known = (blocks >= 0) & np.isfinite(logs).any(axis=1)
    cost = table.cost.copy()
    for block in np.unique(blocks[known]):
        excess = np.nanmean(logs[blocks == block]) - np.nanmean(logs[known])
        cost[blocks == block] *= np.exp((share - 1) * excess)
    return replace(table, cost=cost)
