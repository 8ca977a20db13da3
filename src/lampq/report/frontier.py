"""The best plan for every budget, on the cost table of one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import process_time
from typing import Any

import numpy as np

from lampq.allocate import allocate_ilp
from lampq.artifact.pack import packed_size
from lampq.errors import BudgetError
from lampq.types import MAX_BITS, Allocation, BitPlan, Budget, CostTable, LayerBits, LayerSpec

BUDGETS = tuple(tenths / 10 for tenths in range(20, 81))
# of processor time for all budgets together; what is not solved by then is left out
SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Frontier:
    """The plan of least cost for each budget; None where there is none or the time was up.

    ``uniform`` are the plans of one choice for all layers: for each weight width the one with the
    widest inputs within the budget of activation bits.
    """

    budgets: tuple[float, ...]
    allocations: tuple[Allocation | None, ...]
    uniform: tuple[BitPlan, ...]


def cost_table(layers: Sequence[LayerSpec], sensitivity: Mapping[str, Any]) -> CostTable:
    """The cost table of a sensitivity.json; ``layers`` are those of the model."""
    searched = tuple(layer for layer in layers if layer.name in sensitivity["cost"])
    return CostTable(
        searched,
        tuple(LayerBits(*bits) for bits in sensitivity["choices"]),
        np.array([sensitivity["cost"][layer.name] for layer in searched], dtype=np.float64),
        tuple(tuple(group) for group in sensitivity.get("groups", ())),
    )


def frontier(
    costs: CostTable,
    mean_activation_bits: float | None,
    *,
    budgets: tuple[float, ...] = BUDGETS,
    seconds: float = SECONDS,
) -> Frontier:
    """The optimum for each budget of weight bits, under the run's own budget of activation bits.

    From wide to narrow: an optimum that is also within the next budget is its optimum too.
    """
    end = process_time() + seconds
    found: dict[float, Allocation | None] = {}
    last: Allocation | None = None
    for mean_bits in sorted(budgets, reverse=True):
        budget = Budget(mean_bits, mean_activation_bits)
        if last is None or not last.proven_optimal or not budget.allows(last.plan):
            last = _optimum(costs, budget) if process_time() < end else None
        found[mean_bits] = last
    allocations = tuple(found[mean_bits] for mean_bits in budgets)
    return Frontier(budgets, allocations, _uniform(costs, mean_activation_bits))


def _uniform(costs: CostTable, mean_activation_bits: float | None) -> tuple[BitPlan, ...]:
    budget = Budget(MAX_BITS, mean_activation_bits)
    plans = [BitPlan.uniform(costs.layers, bits) for bits in costs.choices]
    widest = {plan.widths[0].weight: plan for plan in plans if budget.allows(plan)}
    return tuple(widest.values())


def _optimum(costs: CostTable, budget: Budget) -> Allocation | None:
    try:
        return allocate_ilp(costs, budget)
    except BudgetError:
        return None


def frontier_json(found: Frontier, costs: CostTable, other_bytes: int) -> dict[str, Any]:
    """The plans as the page takes them: each once, as columns of the cost table.

    ``other_bytes`` are those of a checkpoint beside the codes of the searched layers.
    """
    plans: dict[tuple[LayerBits, ...], int] = {}
    entries = []
    for allocation in found.allocations:
        if allocation is None or allocation.plan.widths in plans:
            continue
        plans[allocation.plan.widths] = len(plans)
        entries.append(
            {
                "columns": [costs.choices.index(bits) for bits in allocation.plan.widths],
                "proven": allocation.proven_optimal,
                **plan_numbers(allocation.plan, costs, other_bytes),
            }
        )
    return {
        "budgets": list(found.budgets),
        "plan_of_budget": [None if a is None else plans[a.plan.widths] for a in found.allocations],
        "plans": entries,
        "uniform": [
            {
                "bits": [plan.widths[0].weight, plan.widths[0].activation],
                **plan_numbers(plan, costs, other_bytes),
            }
            for plan in found.uniform
        ],
    }


def code_bytes(plan: BitPlan) -> int:
    """Bytes that the packed codes of a plan take."""
    return sum(
        packed_size(layer.n_params, bits.weight)
        for layer, bits in zip(plan.layers, plan.widths, strict=True)
    )


def plan_numbers(plan: BitPlan, costs: CostTable, other_bytes: int) -> dict[str, Any]:
    """What the cost table says of a plan, and what its file would take."""
    total: float | None = None
    if all(bits in costs.choices for bits in plan.widths):
        columns = [costs.choices.index(bits) for bits in plan.widths]
        total = float(costs.cost[np.arange(len(columns)), columns].sum())
    return {"cost": total, "bytes": other_bytes + code_bytes(plan)}
