"""Cost table and budget in, plan out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp

from lampq.errors import BudgetError
from lampq.registry import Registry
from lampq.types import Allocation, BitPlan, Budget, CostTable, LayerBits, LayerSpec

Allocator = Callable[[CostTable, Budget], Allocation]
TIME_LIMIT = 60.0


def check_feasible(
    layers: tuple[LayerSpec, ...], choices: tuple[LayerBits, ...], budget: Budget
) -> None:
    """Raise a BudgetError if even the narrowest choice everywhere is over the budget."""
    narrowest = min(choices, key=lambda bits: bits.weight)
    if not budget.allows(BitPlan.uniform(layers, narrowest)):
        raise BudgetError(
            f"no assignment averages {budget.mean_bits:g} bits: "
            f"the narrowest choice is {narrowest.weight} bits"
        )


def allocate_ilp(costs: CostTable, budget: Budget, *, time_limit: float = TIME_LIMIT) -> Allocation:
    """The plan of least total cost within the budget, by integer linear programming (HiGHS).

    The optimum is proved to a relative gap of zero unless the time limit ends the search first.
    """
    check_feasible(costs.layers, costs.choices, budget)
    lowered = costs.cost - costs.cost.min(axis=1, keepdims=True)
    row, limit = _weight_row(costs, budget)
    unit = float(lowered.max()) or 1.0
    while True:
        solution = _solve(lowered, unit, row, limit, time_limit)
        if solution.x is None:
            raise BudgetError(
                f"the solver found no plan of {budget.mean_bits:g} bits in {time_limit:g} seconds: "
                f"{solution.message}"
            )
        picked = solution.x.reshape(lowered.shape).argmax(axis=1)
        found = float(lowered[np.arange(len(picked)), picked].sum())
        # the solver's gap is absolute: where the optimum is small against the unit, look closer
        if found >= 0.1 * unit or found == 0 or solution.status != 0:
            break
        unit = found
    plan = BitPlan(costs.layers, tuple(costs.choices[column] for column in picked))
    return Allocation(
        plan=budget.checked(plan),
        objective=float(costs.cost[np.arange(len(picked)), picked].sum()),
        status="optimal" if solution.status == 0 else "time limit",
        proven_optimal=solution.status == 0,
    )


def _weight_row(costs: CostTable, budget: Budget) -> tuple[NDArray[np.float64], float]:
    """Weights of the choices in whole units, and a limit half a unit above the last that fits.

    So no tolerance of the solver can admit a plan over the budget, or refuse one within it.
    """
    unit = math.gcd(*(layer.n_params for layer in costs.layers))
    used = np.outer(
        [layer.n_params // unit for layer in costs.layers], [bits.weight for bits in costs.choices]
    )
    return used.reshape(1, -1).astype(np.float64), budget.limit(costs.layers) // unit + 0.5


def _solve(
    cost: NDArray[np.float64],
    unit: float,
    row: NDArray[np.float64],
    limit: float,
    time_limit: float,
) -> Any:
    """The cheapest choice per layer; choices dearer than the unit are left out."""
    n_layers, n_choices = cost.shape
    one_each = np.kron(np.eye(n_layers), np.ones((1, n_choices)))
    return milp(
        np.minimum(cost / unit, 1.0).ravel(),
        integrality=np.ones(cost.size),
        bounds=Bounds(0, (cost <= unit).ravel().astype(np.float64)),
        constraints=LinearConstraint(
            np.vstack([one_each, row / limit]),
            np.append(np.ones(n_layers), -np.inf),
            np.ones(n_layers + 1),
        ),
        options={"time_limit": time_limit, "mip_rel_gap": 0.0},
    )


def allocate_uniform(costs: CostTable, budget: Budget) -> Allocation:
    """The widest single choice within the budget for all layers."""
    check_feasible(costs.layers, costs.choices, budget)
    fitting = [
        column
        for column, bits in enumerate(costs.choices)
        if budget.allows(BitPlan.uniform(costs.layers, bits))
    ]
    plan = BitPlan.uniform(costs.layers, costs.choices[fitting[-1]])
    objective = float(costs.cost[:, fitting[-1]].sum())
    return Allocation(plan, objective, status="uniform", proven_optimal=False)


def random_plan(
    layers: tuple[LayerSpec, ...], choices: tuple[LayerBits, ...], budget: Budget, seed: int
) -> BitPlan:
    """A plan drawn at random and then moved, layer by layer, as near to the budget as it gets."""
    check_feasible(layers, choices, budget)
    random = np.random.default_rng(seed)
    columns = random.integers(len(choices), size=len(layers))
    limit = budget.limit(layers)

    def plan() -> BitPlan:
        return BitPlan(layers, tuple(choices[c] for c in columns))

    while plan().total_weight_bits > limit:
        wide = np.flatnonzero(columns > 0)
        columns[random.choice(wide)] -= 1
    for i in random.permutation(len(layers)):
        while columns[i] + 1 < len(choices):
            columns[i] += 1
            if plan().total_weight_bits > limit:
                columns[i] -= 1
                break
    return budget.checked(plan())


ALLOCATORS: Registry[Allocation] = Registry("allocator", "lampq.allocators")
ALLOCATORS.add("ilp", allocate_ilp)
ALLOCATORS.add("uniform", allocate_uniform)
