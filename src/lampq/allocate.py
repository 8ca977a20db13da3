"""Cost table and budget in, plan out."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp

from lampq.errors import BudgetError
from lampq.registry import Registry
from lampq.types import (
    Allocation,
    BitPlan,
    Budget,
    CostTable,
    LayerBits,
    LayerSpec,
    narrower,
    wider,
)

Allocator = Callable[[CostTable, Budget], Allocation]
TIME_LIMIT = 60.0
# what some versions of HiGHS print although they are told to be silent
STRAY_OUTPUT = b"HighsMipSolverData::"
# the solver tells limits apart to about a millionth: they are counted in as many units at most
UNITS = 200_000


def check_feasible(
    layers: tuple[LayerSpec, ...], choices: tuple[LayerBits, ...], budget: Budget
) -> None:
    """Raise a BudgetError if even the narrowest choice everywhere is over the budget."""
    least = min(bits.weight for bits in choices), min(bits.activation for bits in choices)
    narrowest = BitPlan.uniform(layers, LayerBits(*least))
    weight, activation = replace(budget, limits=()).excess(narrowest)
    if weight:
        raise BudgetError(
            f"no assignment averages {budget.mean_bits:g} bits: "
            f"the narrowest choice is {least[0]} bits"
        )
    if activation:
        raise BudgetError(
            f"no assignment averages {budget.mean_activation_bits:g} activation bits: "
            f"the narrowest choice is {least[1]} bits"
        )
    for limit in budget.limits:
        needed = limit.fixed + sum(
            min(limit.amounts[layer.name, bits] for bits in choices) for layer in layers
        )
        if needed > limit.most:
            raise BudgetError(
                f"no assignment takes {limit.most} {limit.name} or less: "
                f"the narrowest choices take {needed}"
            )


@dataclass(frozen=True, slots=True)
class _Space:
    """The plans to choose from: one choice for each unit of layers, by column.

    ``amounts`` is what every choice of every unit takes of each limit, (limits, units, choices).
    """

    layers: tuple[LayerSpec, ...]
    choices: tuple[LayerBits, ...]
    unit_of_layer: NDArray[np.int64]
    amounts: NDArray[np.int64]
    limits: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        layers: tuple[LayerSpec, ...],
        choices: tuple[LayerBits, ...],
        budget: Budget,
        units: tuple[tuple[str, ...], ...],
    ) -> _Space:
        """The space of a budget that the narrowest choices fit."""
        check_feasible(layers, choices, budget)
        place = {name: number for number, unit in enumerate(units) for name in unit}
        unit_of_layer = np.array([place[layer.name] for layer in layers])
        tables = [[[layer.n_params * bits.weight for bits in choices] for layer in layers]]
        limits = [budget.limit(layers)]
        activation_limit = budget.activation_limit(layers)
        if activation_limit is not None:
            tables.append([[bits.activation for bits in choices] for _ in layers])
            limits.append(activation_limit)
        for limit in budget.limits:
            tables.append([[limit.amounts[layer.name, b] for b in choices] for layer in layers])
            limits.append(limit.most - limit.fixed)
        amounts = np.zeros((len(tables), len(units), len(choices)), dtype=np.int64)
        for total, table in zip(amounts, tables, strict=True):
            np.add.at(total, unit_of_layer, np.array(table, dtype=np.int64))
        return cls(layers, choices, unit_of_layer, amounts, np.array(limits))

    def plan(self, columns: NDArray[np.int64]) -> BitPlan:
        """The plan of one column per unit."""
        picked = columns[self.unit_of_layer]
        return BitPlan(self.layers, tuple(self.choices[column] for column in picked))

    def cost(self, costs: CostTable) -> NDArray[np.float64]:
        """Costs of the units, (units, choices)."""
        summed = np.zeros(self.amounts.shape[1:])
        np.add.at(summed, self.unit_of_layer, costs.cost)
        return summed

    def taken(self, columns: NDArray[np.int64]) -> NDArray[np.int64]:
        """What one column per unit takes of each limit."""
        found: NDArray[np.int64] = self.amounts[:, np.arange(len(columns)), columns].sum(axis=1)
        return found

    def draw(self, random: np.random.Generator) -> NDArray[np.int64]:
        """Columns drawn at random and then moved, unit by unit, as near to the limits as it gets.

        Where the choices leave no way down to a plan within all limits, the descent ends above
        them: the caller checks.
        """
        place = {bits: column for column, bits in enumerate(self.choices)}
        down, up = (
            [[place[other] for other in step(bits, self.choices)] for bits in self.choices]
            for step in (narrower, wider)
        )
        columns = np.asarray(random.integers(len(self.choices), size=self.amounts.shape[1]))
        left = self.limits - self.taken(columns)

        def move(unit: int, steps: list[int]) -> None:
            column = steps[0] if len(steps) == 1 else int(random.choice(steps))
            left[:] += self.amounts[:, unit, columns[unit]] - self.amounts[:, unit, column]
            columns[unit] = column

        def freeing(unit: int) -> list[int]:
            over, column = self.amounts[left < 0, unit], columns[unit]
            return [c for c in down[column] if (over[:, c] < over[:, column]).any()]

        def fitting(unit: int) -> list[int]:
            room = left + self.amounts[:, unit, columns[unit]]
            return [c for c in up[columns[unit]] if (self.amounts[:, unit, c] <= room).all()]

        while (left < 0).any():
            wide = [unit for unit in range(len(columns)) if freeing(unit)]
            if not wide:
                break
            unit = int(random.choice(wide))
            move(unit, freeing(unit))
        for unit in random.permutation(len(columns)):
            while steps := fitting(unit):
                move(unit, steps)
        return columns


def allocate_ilp(costs: CostTable, budget: Budget, *, time_limit: float = TIME_LIMIT) -> Allocation:
    """The plan of least total cost within the budget, by integer linear programming (HiGHS).

    Layers of a group are one variable. The optimum is proved to a relative gap of zero unless the
    time limit ends the search first.
    """
    space = _Space.of(costs.layers, costs.choices, budget, costs.units)
    cost = space.cost(costs)
    lowered = cost - cost.min(axis=1, keepdims=True)
    rows = _limit_rows(space)
    unit = float(lowered.max()) or 1.0
    while True:
        solution = _solve(lowered, unit, rows, time_limit)
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
    return Allocation(
        plan=budget.checked(space.plan(picked)),
        objective=float(cost[np.arange(len(picked)), picked].sum()),
        status="optimal" if solution.status == 0 else "time limit",
        proven_optimal=solution.status == 0,
    )


def _limit_rows(space: _Space) -> NDArray[np.float64]:
    """What every choice of every unit takes of each limit, as a share of it.

    Counted from the narrowest choice up and in whole units, with a limit half a unit above the last
    that fits. So no tolerance of the solver can admit a plan over the budget, or refuse one within
    it. Where amounts have no large common unit, as with bytes, they are rounded up to 1/200,000 of
    what there is to give away.
    """
    rows = []
    for amounts, limit in zip(space.amounts, space.limits, strict=True):
        least = amounts.min(axis=1, keepdims=True)
        more, room = amounts - least, int(limit - least.sum())
        whole = int(np.gcd.reduce(more, axis=None)) or 1
        whole = whole if room // whole <= UNITS else max(whole, -(-room // UNITS))
        rows.append((-(-more // whole)).ravel() / (room // whole + 0.5))
    return np.array(rows)


def _solve(
    cost: NDArray[np.float64],
    unit: float,
    rows: NDArray[np.float64],
    time_limit: float,
) -> Any:
    """The cheapest choice per unit of layers; choices dearer than the cost unit are left out."""
    n_units, n_choices = cost.shape
    one_each = np.kron(np.eye(n_units), np.ones((1, n_choices)))
    with without_stray_output():
        return milp(
            np.minimum(cost / unit, 1.0).ravel(),
            integrality=np.ones(cost.size),
            bounds=Bounds(0, (cost <= unit).ravel().astype(np.float64)),
            constraints=LinearConstraint(
                np.vstack([one_each, rows]),
                np.append(np.ones(n_units), np.full(len(rows), -np.inf)),
                np.ones(n_units + len(rows)),
            ),
            options={"time_limit": time_limit, "mip_rel_gap": 0.0},
        )


@contextmanager
def without_stray_output() -> Iterator[None]:
    """Keep the solver's own lines off standard output, which may be read by a program.

    HiGHS prints some from C whatever its options say (jump-dev/HiGHS.jl, issue 312). What anything
    else writes meanwhile is passed on.
    """
    try:
        original = os.dup(1)
    except OSError:  # no standard output
        yield
        return
    flush = ctypes.CDLL(None).fflush if os.name == "posix" else lambda _all: None
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 1)
        try:
            yield
        finally:
            flush(None)
            os.dup2(original, 1)
            os.close(original)
            caught.seek(0)
            for line in caught:
                if not line.startswith(STRAY_OUTPUT):
                    os.write(1, line)


def allocate_uniform(costs: CostTable, budget: Budget) -> Allocation:
    """The widest single choice within the budget for all layers: by weight, then by activation."""
    check_feasible(costs.layers, costs.choices, budget)
    fitting = [
        column
        for column, bits in enumerate(costs.choices)
        if budget.allows(BitPlan.uniform(costs.layers, bits))
    ]
    if not fitting:
        raise BudgetError("no single choice for all layers is within every limit of the budget")
    plan = BitPlan.uniform(costs.layers, costs.choices[fitting[-1]])
    objective = float(costs.cost[:, fitting[-1]].sum())
    return Allocation(plan, objective, status="uniform", proven_optimal=False)


def random_plan(
    layers: tuple[LayerSpec, ...], choices: tuple[LayerBits, ...], budget: Budget, seed: int
) -> BitPlan:
    """A plan drawn at random and then moved, layer by layer, as near to the budget as it gets."""
    space = _Space.of(layers, choices, budget, tuple((layer.name,) for layer in layers))
    return budget.checked(space.plan(space.draw(np.random.default_rng(seed))))


def allocate_random(costs: CostTable, budget: Budget, *, seed: int = 0) -> Allocation:
    """One plan drawn at random, as a control: costs play no part in it."""
    space = _Space.of(costs.layers, costs.choices, budget, costs.units)
    columns = space.draw(np.random.default_rng(seed))
    objective = float(space.cost(costs)[np.arange(len(columns)), columns].sum())
    plan = budget.checked(space.plan(columns))
    return Allocation(plan, objective, status="random", proven_optimal=False)


def allocate_sampled(
    costs: CostTable, budget: Budget, *, configurations: int = 519, seed: int = 0
) -> Allocation:
    """The cheapest of some plans drawn at random, as VT-PTQ allocates (Liu et al., NeurIPS 2021).

    VT-PTQ scores candidate configurations by the sum of their costs, keeps the Pareto front of cost
    and size, and takes the cheapest within the target. How it draws them is not published: here
    every candidate is within the budget, and no unit of it could be widened. The default is the
    number that VT-PTQ's published time amounts to in runs of AdaLog.
    """
    space = _Space.of(costs.layers, costs.choices, budget, costs.units)
    cost = space.cost(costs)
    random = np.random.default_rng(seed)
    units = np.arange(len(cost))
    drawn = [space.draw(random) for _ in range(configurations)]
    points = [(float(cost[units, c].sum()), int(space.taken(c)[0])) for c in drawn]
    best = pareto_front(points)[0]
    plan = budget.checked(space.plan(drawn[best]))
    return Allocation(plan, points[best][0], status="sampled", proven_optimal=False)


def pareto_front(points: list[tuple[float, int]]) -> list[int]:
    """Numbers of the points (cost, bits) that no other one beats in both, by rising cost."""
    front: list[int] = []
    for number in sorted(range(len(points)), key=lambda i: points[i]):
        if not front or points[number][1] < points[front[-1]][1]:
            front.append(number)
    return front


ALLOCATORS: Registry[Allocation] = Registry("allocator", "lampq.allocators")
ALLOCATORS.add("ilp", allocate_ilp)
ALLOCATORS.add("random", allocate_random)
ALLOCATORS.add("uniform", allocate_uniform)
ALLOCATORS.add("vtptq", allocate_sampled)
