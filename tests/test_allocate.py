from __future__ import annotations

import ctypes
import itertools
import math
import os

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import OptimizeResult

from lampq.allocate import (
    ALLOCATORS,
    allocate_ilp,
    allocate_uniform,
    check_feasible,
    random_plan,
    without_stray_output,
)
from lampq.errors import BudgetError
from lampq.types import BitPlan, Budget, CostTable, LayerBits, LayerRole, LayerSpec

ROLES = (LayerRole.QKV, LayerRole.PROJ, LayerRole.FC1, LayerRole.FC2)
# weights of qkv, proj, fc1, fc2 in each stage of Swin-T: 3, 1, 4, 4 times the squared width
SWIN = tuple(share * width**2 for width in (96, 192, 384, 768) for share in (3, 1, 4, 4))

STAGES_B = ((128, 2), (256, 2), (512, 18), (1024, 2))
SWIN_B = tuple(
    share * width**2 for width, blocks in STAGES_B for _ in range(blocks) for share in (3, 1, 4, 4)
)


def layers_of(sizes: tuple[int, ...]) -> tuple[LayerSpec, ...]:
    return tuple(
        LayerSpec(f"blocks.{i // 4}.{ROLES[i % 4].value}", ROLES[i % 4], i // 4, size)
        for i, size in enumerate(sizes)
    )


def widths(*bits: int) -> tuple[LayerBits, ...]:
    return tuple(LayerBits(b, b) for b in bits)


def random_table(sizes: tuple[int, ...], bits: tuple[int, ...], seed: int) -> CostTable:
    random = np.random.default_rng(seed)
    cost = random.lognormal(size=(len(sizes), len(bits)))
    return CostTable(layers_of(sizes), widths(*bits), cost)


def falling_table(sizes: tuple[int, ...], bits: tuple[int, ...], seed: int) -> CostTable:
    table = random_table(sizes, bits, seed)
    return CostTable(table.layers, table.choices, -np.sort(-table.cost, axis=1))


def decaying_table(
    omega: list[float], sizes: tuple[int, ...], gamma: float, *bits: int
) -> CostTable:
    cost = np.array(omega)[:, None] * gamma ** -np.array(bits, dtype=float)
    return CostTable(layers_of(sizes), widths(*bits), cost)


def every_plan(table: CostTable) -> list[tuple[int, float]]:
    """Weight bits and cost of every plan there is."""
    found = []
    for columns in itertools.product(range(len(table.choices)), repeat=len(table.layers)):
        used = sum(
            layer.n_params * table.choices[c].weight
            for layer, c in zip(table.layers, columns, strict=True)
        )
        found.append((used, sum(float(table.cost[i, c]) for i, c in enumerate(columns))))
    return found


def cheapest_by_enumeration(table: CostTable, limit: int) -> float:
    return min(cost for used, cost in every_plan(table) if used <= limit)


def switch_points(table: CostTable) -> list[int]:
    """The numbers of weight bits from which on a cheaper plan is within the budget."""
    points, best = [], math.inf
    for used, cost in sorted(every_plan(table)):
        if cost < best:
            points, best = [*points, used], cost
    return points


def budget_of(table: CostTable, bits: int) -> Budget:
    """The budget of exactly that many weight bits in all."""
    weights = sum(layer.n_params for layer in table.layers)
    budget = Budget((bits + 0.25) / weights)
    assert budget.limit(table.layers) == bits
    return budget


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mean_bits", [1.0, 1.7, 2.5, 3.0, 3.99, 5.0])
def test_ilp_is_as_good_as_brute_force(mean_bits: float, seed: int) -> None:
    table = random_table((3, 1, 4, 4, 9, 2), (1, 2, 3, 5), seed)
    budget = Budget(mean_bits)
    found = allocate_ilp(table, budget)
    expected = cheapest_by_enumeration(table, budget.limit(table.layers))
    assert found.objective == pytest.approx(expected, rel=1e-12)
    assert budget.allows(found.plan)


@pytest.mark.parametrize("offset", [-1, 0, 1], ids=["just-below", "at", "just-above"])
@pytest.mark.parametrize("seed", range(3))
def test_ilp_is_as_good_as_brute_force_around_every_switch_point(seed: int, offset: int) -> None:
    table = falling_table((30, 10, 40, 41, 7), (2, 3, 4), seed)
    points = switch_points(table)
    assert len(points) > 5
    for bits in points[1:]:
        found = allocate_ilp(table, budget_of(table, bits + offset))
        expected = cheapest_by_enumeration(table, bits + offset)
        assert found.objective == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("short", [1, 30, 1000])
def test_a_budget_a_few_bits_short_of_a_plan_still_gives_the_best_smaller_one(short: int) -> None:
    table = decaying_table([5.0, 1.0, 2.0, 3.0], SWIN[-4:], 4.0, 2, 3, 4)
    for bits in switch_points(table)[1:]:
        budget = budget_of(table, bits - short)
        found = allocate_ilp(table, budget)
        expected = cheapest_by_enumeration(table, bits - short)
        assert found.objective == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("short", [1, 20, 100])
@pytest.mark.parametrize("seed", range(15, 19))
def test_a_budget_a_few_bits_short_is_kept_in_a_large_model(seed: int, short: int) -> None:
    # about 86 million weights: a relative tolerance of a millionth is a hundred bits and more
    omega = np.random.default_rng(seed).lognormal(size=len(SWIN_B))
    table = decaying_table(list(omega), SWIN_B, 4.0, 2, 3, 4, 5)
    wanted = allocate_ilp(table, Budget(3.3))
    budget = budget_of(table, wanted.plan.total_weight_bits - short)
    found = allocate_ilp(table, budget)
    assert budget.allows(found.plan)
    assert found.objective >= wanted.objective


@pytest.mark.parametrize("mean_bits", [2.0, 4.0, 6.5, 7.5])
@pytest.mark.parametrize("gamma", [2.0, 4.0, 20.0])
def test_ilp_is_as_good_as_brute_force_when_costs_span_many_powers_of_ten(
    gamma: float, mean_bits: float
) -> None:
    table = decaying_table([900.0, 1.0, 30.0, 0.01], (3, 1, 4, 4), gamma, *range(1, 9))
    budget = Budget(mean_bits)
    expected = cheapest_by_enumeration(table, budget.limit(table.layers))
    assert allocate_ilp(table, budget).objective == pytest.approx(expected, rel=1e-9)


def test_ilp_takes_costs_that_rise_with_the_width() -> None:
    table = CostTable(layers_of((4, 4)), widths(2, 3), np.array([[1.0, 5.0], [3.0, 2.0]]))
    found = allocate_ilp(table, Budget(3.0))
    assert [bits.weight for bits in found.plan.widths] == [2, 3]
    assert found.objective == 3.0


def test_ilp_takes_negative_and_equal_costs() -> None:
    table = CostTable(layers_of((4, 4)), widths(2, 3), np.array([[-1.0, -5.0], [7.0, 7.0]]))
    assert allocate_ilp(table, Budget(2.5)).objective == 2.0


def test_ilp_with_one_choice_only_returns_it() -> None:
    found = allocate_ilp(random_table((3, 1), (4,), 0), Budget(4.0))
    assert set(found.plan.widths) == {LayerBits(4, 4)}


def test_a_solved_allocation_is_proven_optimal() -> None:
    found = allocate_ilp(random_table((3, 1, 4, 4), (2, 3, 4), 0), Budget(3.0))
    assert found.proven_optimal
    assert found.status == "optimal"


def _stopped(x: np.ndarray | None) -> object:
    """What the solver returns when its time runs out, with the best it has found."""
    return lambda *_, **__: OptimizeResult(x=x, status=1, message="time limit reached")


def test_an_allocation_that_ran_out_of_time_is_not_called_optimal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = random_table((3, 1), (2, 3), 0)
    # binaries come back as floats
    best = np.array([0.9999999, 1e-7, 1e-7, 0.9999999])
    monkeypatch.setattr("lampq.allocate.milp", _stopped(best))
    found = allocate_ilp(table, Budget(3.0))
    assert (found.status, found.proven_optimal) == ("time limit", False)
    assert [bits.weight for bits in found.plan.widths] == [2, 3]
    assert found.objective == pytest.approx(float(table.cost[0, 0] + table.cost[1, 1]))


def test_a_solver_that_found_nothing_in_its_time_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lampq.allocate.milp", _stopped(None))
    with pytest.raises(BudgetError, match="no plan of 3 bits in 7 seconds: time limit reached"):
        allocate_ilp(random_table((3, 1), (2, 3), 0), Budget(3.0), time_limit=7.0)


def test_a_plan_of_the_solver_over_the_budget_does_not_leave_the_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lampq.allocate.milp", _stopped(np.array([0.0, 1.0, 0.0, 1.0])))
    with pytest.raises(BudgetError):
        allocate_ilp(random_table((3, 1), (2, 3), 0), Budget(2.5))


@pytest.mark.parametrize("allocator", list(ALLOCATORS))
def test_an_infeasible_budget_is_named_with_the_narrowest_choice(allocator: str) -> None:
    table = random_table((3, 1, 4, 4), (3, 4), 0)
    with pytest.raises(BudgetError, match=r"averages 2\.5 bits: the narrowest choice is 3 bits"):
        ALLOCATORS.get(allocator)(table, Budget(2.5))


def test_a_random_plan_of_an_infeasible_budget_is_refused() -> None:
    with pytest.raises(BudgetError, match="narrowest choice is 3 bits"):
        random_plan(layers_of((3, 1)), widths(3, 4), Budget(2.9), 0)


def test_the_narrowest_choice_itself_is_feasible() -> None:
    layers = layers_of((3, 1))
    check_feasible(layers, widths(3, 4), Budget(3.0))
    with pytest.raises(BudgetError):
        check_feasible(layers, widths(3, 4), Budget(3.0 - 1e-6))


@pytest.mark.parametrize("gamma", [2.0, 4.0, 10.0])
@pytest.mark.parametrize("seed", range(3))
def test_widths_are_spaced_as_the_lagrangian_says(seed: int, gamma: float) -> None:
    # relaxed optimum: B_i - B_j = log_gamma of (Omega_i / c_i) / (Omega_j / c_j)
    random = np.random.default_rng(seed)
    sizes = (3, 1, 4, 4) * 3
    exact = random.uniform(2.5, 7.5, size=len(sizes))
    table = decaying_table(list(gamma**exact * sizes), sizes, gamma, *range(1, 9))
    # the size of a plan on the convex hull, where rounding is all that keeps the two apart
    bits = int(np.floor(exact) @ np.array(sizes))
    plan = allocate_ilp(table, budget_of(table, bits)).plan
    got = np.array([plan[layer.name].weight for layer in table.layers])
    spacing = (got[:, None] - got[None]) - (exact[:, None] - exact[None])
    assert got.max() - got.min() >= 3
    assert np.abs(spacing).max() <= 1


def test_a_smaller_gamma_spreads_the_widths_further() -> None:
    omega = [1.0, 8.0, 64.0, 512.0]
    spans = []
    for gamma in (2.0, 8.0, 1e6):
        plan = allocate_ilp(
            decaying_table(omega, (1, 1, 1, 1), gamma, *range(1, 9)), Budget(4.5)
        ).plan
        got = [bits.weight for bits in plan.widths]
        spans.append(max(got) - min(got))
    assert spans[0] > spans[1] > spans[2]


@pytest.mark.parametrize("mean_bits", [2.3, 3.0, 3.5])
def test_equal_cost_per_weight_and_a_large_gamma_give_nearly_uniform_widths(
    mean_bits: float,
) -> None:
    table = decaying_table([float(n) for n in SWIN], SWIN, 50.0, 1, 2, 3, 4, 5)
    plan = allocate_ilp(table, Budget(mean_bits)).plan
    near = (math.floor(mean_bits), math.floor(mean_bits) + 1)
    others = sum(layer.n_params for layer in plan.layers if plan[layer.name].weight not in near)
    # what no large layer can use may go to the smallest ones
    assert others < 0.01 * sum(SWIN)


@pytest.mark.parametrize(("mean_bits", "expected"), [(2.0, 2), (3.9, 3), (4.0, 4), (9.0, 4)])
def test_the_uniform_allocator_takes_the_widest_choice_that_fits(
    mean_bits: float, expected: int
) -> None:
    table = random_table((3, 1, 4, 4), (2, 3, 4), 0)
    found = allocate_uniform(table, Budget(mean_bits))
    assert set(found.plan.widths) == {LayerBits(expected, expected)}
    assert found.objective == pytest.approx(float(table.cost[:, expected - 2].sum()))


budgets = st.floats(2.0, 5.0)
seeds = st.integers(0, 2**32 - 1)


@given(mean_bits=budgets, seed=seeds)
def test_a_random_plan_fits_and_no_layer_could_be_widened(mean_bits: float, seed: int) -> None:
    layers, choices, budget = layers_of(SWIN), widths(2, 3, 4, 5), Budget(mean_bits)
    plan = random_plan(layers, choices, budget, seed)
    assert budget.allows(plan)
    for name, bits in plan.items():
        if bits != choices[-1]:
            wider = choices[choices.index(bits) + 1]
            assert not budget.allows(plan.with_bits(name, wider))


@given(seed=seeds)
def test_a_random_plan_of_the_same_seed_is_the_same(seed: int) -> None:
    arguments = layers_of(SWIN), widths(2, 3, 4, 5), Budget(3.3)
    assert random_plan(*arguments, seed) == random_plan(*arguments, seed)


def test_random_plans_differ_between_seeds() -> None:
    plans = {random_plan(layers_of(SWIN), widths(2, 3, 4), Budget(3.0), s).widths for s in range(8)}
    assert len(plans) > 4


@given(
    mean_bits=budgets,
    gamma=st.floats(1.5, 20.0),
    logs=st.lists(st.floats(-8, 8), min_size=16, max_size=16),
)
def test_ilp_never_exceeds_the_budget_with_layers_of_swin(
    mean_bits: float, gamma: float, logs: list[float]
) -> None:
    table = decaying_table([math.exp(x) for x in logs], SWIN, gamma, 2, 3, 4, 5)
    budget = Budget(mean_bits)
    found = allocate_ilp(table, budget)
    weights = sum(SWIN)
    used = sum(layer.n_params * found.plan[layer.name].weight for layer in table.layers)
    assert used / weights <= mean_bits * (1 + 1e-9)


@given(bits=st.integers(2, 5), drawn=st.lists(st.integers(0, 3), min_size=16, max_size=16))
def test_a_plan_found_at_the_exact_size_of_another_plan_is_not_dearer(
    bits: int, drawn: list[int]
) -> None:
    table = random_table(SWIN, (2, 3, 4, 5), bits)
    other = BitPlan(table.layers, tuple(table.choices[c] for c in drawn))
    assume(other.total_weight_bits > 2 * sum(SWIN))
    cost = float(table.cost[np.arange(16), drawn].sum())
    found = allocate_ilp(table, budget_of(table, other.total_weight_bits))
    assert found.objective <= cost * (1 + 1e-9)


def test_lines_that_the_solver_prints_are_dropped_and_others_are_kept(
    capfd: pytest.CaptureFixture[str],
) -> None:
    say = ctypes.CDLL(None).puts
    say(b"before")
    with without_stray_output():
        say(b"HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();")
        os.write(1, b"of somebody else\n")
    os.write(1, b"after\n")
    assert capfd.readouterr().out.splitlines() == ["before", "of somebody else", "after"]
