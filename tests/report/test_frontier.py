from __future__ import annotations

import itertools

import numpy as np
import pytest

from lampq.report.frontier import (
    BUDGETS,
    code_bytes,
    cost_table,
    frontier,
    frontier_json,
    plan_numbers,
)
from lampq.types import BitPlan, Budget, CostTable, LayerBits, LayerRole, LayerSpec

ROLES = (LayerRole.QKV, LayerRole.PROJ, LayerRole.FC1, LayerRole.FC2)
LAYERS = tuple(
    LayerSpec(f"blocks.{block}.{role}", role, block, 10 * size)
    for block in range(2)
    for role, size in zip(ROLES, (3, 1, 4, 4), strict=True)
)


def table(weights: tuple[int, ...], seed: int = 0, activations: tuple[int, ...] = ()) -> CostTable:
    random = np.random.default_rng(seed)
    pairs = [(w, a) for w in weights for a in activations or (w,)]
    choices = tuple(LayerBits(w, a) for w, a in pairs)
    scale = np.exp(random.normal(0, 1.5, len(LAYERS)))
    cost = np.array([[s * (4.0**-w + 4.0**-a) for w, a in pairs] for s in scale])
    cost *= np.exp(random.normal(0, 0.3, cost.shape))
    return CostTable(LAYERS, choices, cost)


def cheapest(costs: CostTable, budget: Budget) -> float | None:
    """The least cost of all plans within the budget, by trying them all."""
    sizes = np.array([layer.n_params for layer in costs.layers])
    columns = np.array(list(itertools.product(range(len(costs.choices)), repeat=len(sizes))))
    weights = np.array([bits.weight for bits in costs.choices])[columns] @ sizes
    inputs = np.array([bits.activation for bits in costs.choices])[columns].sum(axis=1)
    limit = budget.activation_limit(costs.layers)
    allowed = (weights <= budget.limit(costs.layers)) & (limit is None or inputs <= limit)
    total = costs.cost[np.arange(len(sizes)), columns].sum(axis=1)
    return float(total[allowed].min()) if allowed.any() else None


@pytest.mark.parametrize("seed", [0, 1])
def test_every_budget_has_the_plan_that_costs_least(seed: int) -> None:
    costs = table((2, 3, 4), seed)
    found = frontier(costs, None)
    assert found.budgets == BUDGETS == tuple(round(2 + 0.1 * i, 1) for i in range(61))
    for mean_bits, allocation in zip(found.budgets, found.allocations, strict=True):
        assert allocation is not None
        assert allocation.proven_optimal
        assert Budget(mean_bits).allows(allocation.plan)
        assert allocation.objective == pytest.approx(cheapest(costs, Budget(mean_bits)))


def test_the_budget_of_activation_bits_is_kept_too() -> None:
    costs = table((2, 4), 2, (2, 3))
    budgets = (2.0, 2.6, 3.1, 4.0)
    found = frontier(costs, 2.5, budgets=budgets)
    for mean_bits, allocation in zip(budgets, found.allocations, strict=True):
        assert allocation is not None
        budget = Budget(mean_bits, 2.5)
        assert budget.allows(allocation.plan)
        assert allocation.objective == pytest.approx(cheapest(costs, budget))


def test_there_is_no_plan_below_the_narrowest_choice() -> None:
    found = frontier(table((3, 4)), None)
    missing = [b for b, a in zip(found.budgets, found.allocations, strict=True) if a is None]
    assert missing == [b for b in BUDGETS if b < 3]


def test_above_the_widest_choice_the_plan_stays() -> None:
    # falling costs: all layers take the widest choice
    cost = np.tile([3.0, 2.0, 1.0], (len(LAYERS), 1))
    costs = CostTable(LAYERS, (LayerBits(2, 2), LayerBits(3, 3), LayerBits(4, 4)), cost)
    found = frontier(costs, None)
    widest = BitPlan.uniform(LAYERS, LayerBits(4, 4))
    above = [a for b, a in zip(found.budgets, found.allocations, strict=True) if b >= 4]
    assert len(above) == 41
    assert all(a is not None and a.plan == widest for a in above)


def test_layers_of_a_group_share_their_width() -> None:
    plain = table((2, 3, 4), 3)
    groups = tuple((LAYERS[i].name, LAYERS[i + 1].name) for i in range(0, len(LAYERS), 2))
    found = frontier(CostTable(plain.layers, plain.choices, plain.cost, groups), None)
    for allocation in found.allocations:
        assert allocation is not None
        assert all(allocation.plan[a] == allocation.plan[b] for a, b in groups)


def test_without_time_there_are_no_plans() -> None:
    assert set(frontier(table((2, 3)), None, seconds=0).allocations) == {None}


def test_a_cost_table_comes_back_from_its_file() -> None:
    content = {
        "choices": [[2, 2], [4, 6]],
        "cost": {LAYERS[1].name: [2.0, 1.0], LAYERS[0].name: [4.0, 3.0]},
        "groups": [[LAYERS[0].name, LAYERS[1].name]],
    }
    found = cost_table(LAYERS, content)
    assert found.layers == LAYERS[:2]
    assert found.choices == (LayerBits(2, 2), LayerBits(4, 6))
    assert found.cost.tolist() == [[4.0, 3.0], [2.0, 1.0]]
    assert found.groups == ((LAYERS[0].name, LAYERS[1].name),)


def test_the_page_gets_every_plan_once_and_can_rebuild_all() -> None:
    costs = table((2, 3, 4))
    found = frontier(costs, None)
    content = frontier_json(found, costs, other_bytes=100)
    numbers = content["plan_of_budget"]
    assert sorted(set(numbers)) == list(range(len(content["plans"])))
    for number, allocation in zip(numbers, found.allocations, strict=True):
        assert allocation is not None
        plan = content["plans"][number]
        assert tuple(costs.choices[c] for c in plan["columns"]) == allocation.plan.widths
        assert plan["cost"] == pytest.approx(allocation.objective)
        bits = allocation.plan.total_weight_bits
        # each of the eight layers may be padded to a whole byte
        assert 100 + bits / 8 <= plan["bytes"] <= 100 + bits / 8 + 8


def test_uniform_plans_have_the_widest_inputs_within_the_budget() -> None:
    costs = table((2, 4), 2, (2, 3, 4))
    content = frontier_json(frontier(costs, 3.0, budgets=(2.0,)), costs, 0)
    assert [plan["bits"] for plan in content["uniform"]] == [[2, 3], [4, 3]]
    column = costs.choices.index(LayerBits(4, 3))
    assert content["uniform"][1]["cost"] == pytest.approx(float(costs.cost[:, column].sum()))


def test_a_plan_outside_the_choices_has_a_size_but_no_cost() -> None:
    plan = BitPlan.uniform(LAYERS, LayerBits(8, 8))
    assert code_bytes(plan) == sum(layer.n_params for layer in LAYERS)
    assert plan_numbers(plan, table((2, 3)), 50) == {"cost": None, "bytes": 50 + code_bytes(plan)}
