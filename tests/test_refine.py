from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lampq.allocate import random_plan
from lampq.refine import Move, RefineOptions, gains_and_harms, propose, refine
from lampq.types import BitPlan, Budget, LayerBits, LayerRole, LayerSpec, Step, narrower, wider

ROLES = (LayerRole.QKV, LayerRole.PROJ, LayerRole.FC1, LayerRole.FC2)
SIZES = {
    "equal": (10,) * 8,
    "vit": (3, 1, 4, 4) * 3,
    "swin": tuple(share * width**2 for width in (96, 192, 384) for share in (3, 1, 4, 4)),
    "one-large": (1, 1, 1, 1, 7, 100),
}
CHOICES = tuple(LayerBits(b, b) for b in (2, 3, 4, 5))
sizes = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)


def layers_of(sizes: tuple[int, ...]) -> tuple[LayerSpec, ...]:
    return tuple(
        LayerSpec(f"blocks.{i // 4}.{ROLES[i % 4].value}", ROLES[i % 4], i // 4, size)
        for i, size in enumerate(sizes)
    )


class Landscape:
    """A score of plans with a random sensitivity per layer and noise; remembers what it scored."""

    def __init__(self, layers: tuple[LayerSpec, ...], seed: int, noise: float = 0.3) -> None:
        random = np.random.default_rng(seed)
        self.omega = dict(
            zip((layer.name for layer in layers), random.lognormal(size=len(layers)), strict=True)
        )
        self.seed, self.noise = seed, noise
        self.scored: list[BitPlan] = []

    def error_at(self, name: str, bits: LayerBits) -> float:
        return float(self.omega[name] * 4.0**-bits.weight)

    def errors(self, plan: BitPlan) -> dict[str, float]:
        return {name: self.error_at(name, bits) for name, bits in plan.items()}

    def score(self, plan: BitPlan) -> float:
        self.scored.append(plan)
        random = np.random.default_rng([self.seed, *(b.weight for b in plan.widths)])
        return -sum(self.errors(plan).values()) * (1 + self.noise * random.normal())


def moves(width: int, values: dict[str, float]) -> dict[Move, float]:
    """Moves of single layers to one width."""
    return {Move((name,), LayerBits(width, width)): value for name, value in values.items()}


def by_name(values: dict[Move, float]) -> dict[str, float]:
    """Values of the moves of single layers that have one move each."""
    return {move.layers[0]: value for move, value in values.items()}


def run(
    plan: BitPlan,
    budget: Budget,
    land: Landscape,
    *,
    score: Callable[[BitPlan], float] | None = None,
    choices: tuple[LayerBits, ...] = CHOICES,
    **options: object,
) -> list[Step]:
    return list(
        refine(
            plan,
            budget,
            choices=choices,
            errors=land.errors,
            error_at=land.error_at,
            score=score or land.score,
            options=RefineOptions(**options),  # type: ignore[arg-type]
        )
    )


runs = given(
    shape=st.sampled_from(sorted(SIZES)),
    mean_bits=st.floats(2.0, 5.0),
    seed=st.integers(0, 10**6),
    patience=st.sampled_from([0, 3, 10**6]),
    ratios=st.sampled_from(["paper", "exact", "optimal", "measured"]),
    formula=st.sampled_from(["verbal", "printed"]),
)


@runs
def test_an_exchange_never_exceeds_the_budget(
    shape: str, mean_bits: float, seed: int, patience: int, ratios: str, formula: str
) -> None:
    layers, budget = layers_of(SIZES[shape]), Budget(mean_bits)
    land = Landscape(layers, seed)
    start = random_plan(layers, CHOICES, budget, seed)
    steps = run(
        start,
        budget,
        land,
        patience=patience,
        ratios=ratios,
        gain_formula=formula,
        max_exchanges=40,
    )
    weights = sum(SIZES[shape])
    for step in steps:
        used = sum(layer.n_params * step.plan[layer.name].weight for layer in layers)
        assert used <= mean_bits * weights * (1 + 1e-9)


@runs
def test_accepted_scores_rise_strictly_and_rejected_ones_do_not(
    shape: str, mean_bits: float, seed: int, patience: int, ratios: str, formula: str
) -> None:
    layers, budget = layers_of(SIZES[shape]), Budget(mean_bits)
    land = Landscape(layers, seed)
    start = random_plan(layers, CHOICES, budget, seed)
    best = Landscape(layers, seed).score(start)
    for step in run(
        start,
        budget,
        land,
        patience=patience,
        ratios=ratios,
        gain_formula=formula,
        max_exchanges=40,
    ):
        assert step.accepted == (step.score > best)
        best = max(best, step.score)


@runs
def test_no_plan_is_scored_twice(
    shape: str, mean_bits: float, seed: int, patience: int, ratios: str, formula: str
) -> None:
    layers, budget = layers_of(SIZES[shape]), Budget(mean_bits)
    land = Landscape(layers, seed)
    start = random_plan(layers, CHOICES, budget, seed)
    steps = run(
        start,
        budget,
        land,
        patience=patience,
        ratios=ratios,
        gain_formula=formula,
        max_exchanges=40,
    )
    scored = [plan.widths for plan in land.scored]
    assert len(set(scored)) == len(scored)
    assert scored == [start.widths, *(step.plan.widths for step in steps)]


@runs
def test_a_step_changes_the_layers_it_names_by_one_choice_and_no_other(
    shape: str, mean_bits: float, seed: int, patience: int, ratios: str, formula: str
) -> None:
    layers, budget = layers_of(SIZES[shape]), Budget(mean_bits)
    land = Landscape(layers, seed)
    plan = random_plan(layers, CHOICES, budget, seed)
    for step in run(
        plan,
        budget,
        land,
        patience=patience,
        ratios=ratios,
        gain_formula=formula,
        max_exchanges=40,
    ):
        change = {
            name: CHOICES.index(step.plan[name]) - CHOICES.index(plan[name])
            for name in plan
            if step.plan[name] != plan[name]
        }
        assert change == {**dict.fromkeys(step.widened, 1), **dict.fromkeys(step.narrowed, -1)}
        plan = step.plan if step.accepted else plan


@sizes
def test_the_search_ends_by_itself_even_if_every_plan_is_better_than_the_last(
    sizes: tuple[int, ...],
) -> None:
    layers, budget = layers_of(sizes[:6]), Budget(2.5)
    land = Landscape(layers, 0)
    count = iter(range(10**9))
    start = BitPlan.uniform(layers, CHOICES[0])
    steps = run(
        start,
        budget,
        land,
        score=lambda _: next(count),
        choices=CHOICES[:3],
        max_exchanges=10**9,
        patience=10**9,
    )
    assert 0 < len(steps) < 3**6
    assert all(step.accepted for step in steps)


@pytest.mark.parametrize(
    "sizes", [SIZES[k] for k in ("equal", "vit", "swin")], ids=["equal", "vit", "swin"]
)
def test_the_search_ends_by_itself_if_all_scores_tie(sizes: tuple[int, ...]) -> None:
    layers, budget = layers_of(sizes), Budget(3.0)
    start = random_plan(layers, CHOICES, budget, 0)
    steps = run(start, budget, Landscape(layers, 0), score=lambda _: 1.0, patience=10**9)
    assert steps
    assert not any(step.accepted for step in steps)


@pytest.mark.parametrize("patience", [0, 1, 4])
def test_the_search_ends_after_the_rejections_that_patience_allows(patience: int) -> None:
    layers, budget = layers_of(SIZES["vit"]), Budget(3.0)
    start = random_plan(layers, CHOICES, budget, 0)
    scores = iter([0.0, 1.0, 0.5, *[0.0] * 50])
    steps = run(
        start, budget, Landscape(layers, 0), score=lambda _: next(scores), patience=patience
    )
    assert [step.accepted for step in steps] == [True] + [False] * (patience + 1)


def test_an_accepted_exchange_renews_the_patience() -> None:
    layers, budget = layers_of(SIZES["vit"]), Budget(3.0)
    start = random_plan(layers, CHOICES, budget, 0)
    scores = iter([0.0, -1.0, 1.0, 0.5, 2.0, *[0.0] * 50])
    steps = run(start, budget, Landscape(layers, 0), score=lambda _: next(scores), patience=1)
    assert [step.accepted for step in steps] == [False, True, False, True, False, False]


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_no_more_exchanges_are_attempted_than_allowed(limit: int) -> None:
    layers, budget = layers_of(SIZES["vit"]), Budget(3.0)
    start = random_plan(layers, CHOICES, budget, 0)
    count = iter(range(100))
    steps = run(
        start, budget, Landscape(layers, 0), score=lambda _: next(count), max_exchanges=limit
    )
    assert len(steps) == limit


def test_a_tie_is_rejected() -> None:
    layers, budget = layers_of(SIZES["equal"]), Budget(3.0)
    start = random_plan(layers, CHOICES, budget, 0)
    steps = run(start, budget, Landscape(layers, 0), score=lambda _: 50.0)
    assert [step.accepted for step in steps] == [False]


def test_exchanges_without_noise_do_not_leave_the_plan_worse() -> None:
    layers, budget = layers_of(SIZES["swin"]), Budget(3.0)
    land = Landscape(layers, 3, noise=0.0)
    start = random_plan(layers, CHOICES, budget, 3)
    steps = run(start, budget, land, ratios="measured", patience=5)
    accepted = [step for step in steps if step.accepted]
    assert accepted
    assert sum(land.errors(accepted[-1].plan).values()) < sum(land.errors(start).values())


@given(seed=st.integers(0, 10**6), mean_bits=st.floats(2.0, 4.9))
def test_unweighted_exchanges_keep_the_number_of_bits(seed: int, mean_bits: float) -> None:
    layers, budget = layers_of(SIZES["vit"]), Budget(mean_bits)
    start = random_plan(layers, CHOICES, budget, seed)
    steps = run(
        start,
        budget,
        Landscape(layers, seed),
        swap_budget="unweighted",
        patience=2,
        max_exchanges=20,
    )
    total = sum(bits.weight for bits in start.widths)
    assert all(sum(bits.weight for bits in step.plan.widths) == total for step in steps)
    assert all(len(step.narrowed) == 1 for step in steps)


def test_a_large_layer_is_paid_for_by_several_small_ones() -> None:
    layers = layers_of((100, 60, 60, 60))
    plan = BitPlan.uniform(layers, LayerBits(3, 3))
    names = list(plan)
    gains = moves(4, {names[0]: 9.0})
    harms = moves(2, {names[1]: 1.0, names[2]: 2.0, names[3]: 3.0})
    found = propose(plan, Budget(3.0), gains, harms, RefineOptions())
    assert [exchange.narrowed for exchange, _ in found] == [(names[1], names[2])]
    assert found[0][0].gain == 9.0 - 1.0 - 2.0
    assert Budget(3.0).allows(found[0][1])


def test_a_widening_that_the_budget_allows_costs_no_other_layer() -> None:
    layers = layers_of((4, 4))
    plan = BitPlan.uniform(layers, LayerBits(3, 3))
    gains, harms = moves(4, {"blocks.0.qkv": 1.0}), moves(2, {"blocks.0.proj": 0.1})
    found = propose(plan, Budget(3.5), gains, harms, RefineOptions())
    assert [(e.widened, e.narrowed, e.gain) for e, _ in found] == [(("blocks.0.qkv",), (), 1.0)]


def test_a_widening_that_nothing_can_pay_for_is_not_proposed() -> None:
    layers = layers_of((100, 1))
    plan = BitPlan.uniform(layers, LayerBits(3, 3))
    gains, harms = moves(4, {"blocks.0.qkv": 1.0}), moves(2, {"blocks.0.proj": 0.1})
    assert propose(plan, Budget(3.0), gains, harms, RefineOptions()) == []


def test_exchanges_are_proposed_by_falling_net_gain() -> None:
    layers = layers_of((4, 4, 4))
    plan = BitPlan.uniform(layers, LayerBits(3, 3))
    a, b, c = plan
    gains, harms = moves(4, {a: 5.0, b: 4.0}), moves(2, {b: 3.0, c: 1.0})
    found = propose(plan, Budget(3.0), gains, harms, RefineOptions())
    assert [(e.widened, e.narrowed, e.gain) for e, _ in found] == [
        ((a,), (c,), 4.0),
        ((b,), (c,), 3.0),
        ((a,), (b,), 2.0),
    ]


@pytest.mark.parametrize(
    ("width", "expected"),
    [(2, (None, 3)), (3, (2, 5)), (5, (3, None))],
    ids=["narrowest", "middle", "widest"],
)
def test_neighbours_are_the_choices_beside(
    width: int, expected: tuple[int | None, int | None]
) -> None:
    choices = tuple(LayerBits(b, b + 1) for b in (2, 3, 5))
    bits = LayerBits(width, width + 1)
    found = (narrower(bits, choices), wider(bits, choices))
    assert found == tuple(() if b is None else (LayerBits(b, b + 1),) for b in expected)


# expected fall and rise of one layer's error, as multiples of it, with the ratios the paper prints:
# 1 - 1 / R(B+1) and R(B) - 1 by hand from 82.74, 6.59, 4.70, 4.29, 4.13
GAIN_FACTOR = {1: 0.988, 2: 0.848, 3: 0.787, 4: 0.767, 5: 0.758}
HARM_FACTOR = {2: 81.74, 3: 5.59, 4: 3.70, 5: 3.29}
ALL = tuple(LayerBits(b, b) for b in range(1, 9))
NO_MEASURE: Callable[[str, LayerBits], float] = lambda name, bits: math.nan  # noqa: E731


def one_layer(width: int, error: float, **options: object) -> tuple[float | None, float | None]:
    """Gain and harm of a single layer."""
    plan = BitPlan.uniform(layers_of((4,)), LayerBits(width, width))
    (name,) = plan
    gains, harms = gains_and_harms(
        plan,
        ALL,
        {name: error},
        NO_MEASURE,
        RefineOptions(**options),  # type: ignore[arg-type]
    )
    return next(iter(gains.values()), None), next(iter(harms.values()), None)


@pytest.mark.parametrize("width", GAIN_FACTOR)
def test_the_gain_is_the_error_that_one_more_bit_removes(width: int) -> None:
    assert one_layer(width, 0.02)[0] == pytest.approx(0.02 * GAIN_FACTOR[width], rel=1e-3)


@pytest.mark.parametrize("width", HARM_FACTOR)
def test_the_harm_is_the_error_that_one_bit_less_adds(width: int) -> None:
    assert one_layer(width, 0.02)[1] == pytest.approx(0.02 * HARM_FACTOR[width], rel=1e-6)


@pytest.mark.parametrize("width", sorted(GAIN_FACTOR.keys() & HARM_FACTOR.keys()))
def test_the_printed_formulas_interchange_gain_and_harm(width: int) -> None:
    gain, harm = one_layer(width, 0.02, gain_formula="printed")
    assert gain == pytest.approx(0.02 * HARM_FACTOR[width], rel=1e-6)
    assert harm == pytest.approx(0.02 * GAIN_FACTOR[width], rel=1e-3)


@pytest.mark.parametrize("formula", ["verbal", "printed"])
@pytest.mark.parametrize(("width", "missing"), [(1, "harm"), (8, "gain")])
def test_there_is_no_gain_at_the_widest_and_no_harm_at_the_narrowest(
    width: int, missing: str, formula: str
) -> None:
    found = dict(zip(("gain", "harm"), one_layer(width, 0.02, gain_formula=formula), strict=True))
    assert found[missing] is None
    assert found["harm" if missing == "gain" else "gain"] is not None


def test_a_step_over_missing_widths_multiplies_the_ratios() -> None:
    plan = BitPlan.uniform(layers_of((4,)), LayerBits(4, 4))
    (name,) = plan
    choices = tuple(LayerBits(b, b) for b in (2, 4, 6))
    gains, harms = gains_and_harms(plan, choices, {name: 1.0}, NO_MEASURE, RefineOptions())
    assert by_name(gains)[name] == pytest.approx(1 - 1 / (4.29 * 4.13))
    assert by_name(harms)[name] == pytest.approx(6.59 * 4.70 - 1)


def test_measured_gains_and_harms_are_differences_of_measured_errors() -> None:
    plan = BitPlan.uniform(layers_of((4,)), LayerBits(3, 3))
    (name,) = plan
    measured = {2: 10.0, 3: 4.0, 4: 1.0}
    gains, harms = gains_and_harms(
        plan,
        CHOICES,
        {name: math.nan},
        lambda _, bits: measured[bits.weight],
        RefineOptions(ratios="measured"),
    )
    assert (by_name(gains)[name], by_name(harms)[name]) == (3.0, 6.0)


def test_a_measured_error_that_rises_with_the_width_counts_as_no_gain() -> None:
    plan = BitPlan.uniform(layers_of((4,)), LayerBits(3, 3))
    (name,) = plan
    measured = {2: 3.0, 3: 4.0, 4: 6.0}
    gains, harms = gains_and_harms(
        plan,
        CHOICES,
        {name: math.nan},
        lambda _, bits: measured[bits.weight],
        RefineOptions(ratios="measured"),
    )
    assert (by_name(gains)[name], by_name(harms)[name]) == (0.0, 0.0)
