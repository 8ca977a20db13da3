"""Weight and activation widths chosen apart, and layers that share a width."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Case
from hypothesis import given
from hypothesis import strategies as st

import lampq
from lampq import quantize
from lampq.allocate import ALLOCATORS, allocate_ilp, allocate_random, allocate_sampled, pareto_front
from lampq.artifact.fits import FitFolder
from lampq.config import make_config
from lampq.errors import BudgetError, ConfigError
from lampq.metrics import METRICS
from lampq.pipeline import Result
from lampq.progress import Journal
from lampq.refine import RefineOptions, expected_error, gains_and_harms, refine, step_ratio
from lampq.report import build_report, plan_json, report_markdown
from lampq.runfolder import read_plan
from lampq.scoring import Run
from lampq.types import (
    BitPlan,
    Budget,
    CostTable,
    LayerBits,
    LayerRole,
    LayerSpec,
    Step,
    narrower,
    separate,
    wider,
)

ROLES = (LayerRole.QKV, LayerRole.PROJ, LayerRole.FC1, LayerRole.FC2)
SIZES = (3, 1, 4, 4, 9)
WEIGHTS, ACTIVATIONS = (2, 3, 5), (2, 4)
GRID = tuple(LayerBits(w, a) for w in WEIGHTS for a in ACTIVATIONS)
CHAIN = tuple(LayerBits(b, b) for b in (2, 3, 4, 5))


def layers_of(sizes: tuple[int, ...]) -> tuple[LayerSpec, ...]:
    return tuple(
        LayerSpec(f"blocks.{i // 4}.{ROLES[i % 4].value}", ROLES[i % 4], i // 4, size)
        for i, size in enumerate(sizes)
    )


def modules_of(layers: tuple[LayerSpec, ...]) -> tuple[tuple[str, ...], ...]:
    """Two layers a group, as VT-PTQ has them; a last odd one on its own."""
    names = [layer.name for layer in layers]
    return tuple(tuple(names[i : i + 2]) for i in range(0, len(names) - 1, 2))


def table_of(
    sizes: tuple[int, ...],
    choices: tuple[LayerBits, ...],
    seed: int,
    *,
    grouped: bool = False,
) -> CostTable:
    layers = layers_of(sizes)
    cost = np.random.default_rng(seed).lognormal(size=(len(sizes), len(choices)))
    return CostTable(layers, choices, cost, modules_of(layers) if grouped else ())


def within(plan: BitPlan, budget: Budget) -> bool:
    """Whether a plan is within both means, counted by hand."""
    weights = sum(layer.n_params for layer in plan.layers)
    used = sum(layer.n_params * plan[layer.name].weight for layer in plan.layers)
    inputs = sum(plan[layer.name].activation for layer in plan.layers)
    mean = budget.mean_activation_bits
    return used <= budget.mean_bits * weights * (1 + 1e-9) and (
        mean is None or inputs <= mean * len(plan) * (1 + 1e-9)
    )


def shared(plan: BitPlan, groups: tuple[tuple[str, ...], ...]) -> bool:
    return all(len({plan[name] for name in group}) == 1 for group in groups)


def cheapest_by_enumeration(table: CostTable, budget: Budget) -> float:
    best = np.inf
    for columns in itertools.product(range(len(table.choices)), repeat=len(table.layers)):
        plan = BitPlan(table.layers, tuple(table.choices[c] for c in columns))
        if within(plan, budget) and shared(plan, table.groups):
            best = min(best, float(table.cost[np.arange(len(columns)), list(columns)].sum()))
    return best


BUDGETS = {
    "loose": Budget(5.0, 4.0),
    "weights-tight": Budget(2.4, 4.0),
    "inputs-tight": Budget(5.0, 2.4),
    "both-tight": Budget(2.7, 2.8),
    "narrowest": Budget(2.0, 2.0),
    "fractions": Budget(3.3, 3.19),
}


@pytest.mark.parametrize("grouped", [False, True], ids=["layers", "modules"])
@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize("seed", range(2))
def test_ilp_with_two_budgets_is_as_good_as_brute_force(
    budget: Budget, seed: int, grouped: bool
) -> None:
    table = table_of(SIZES if grouped else SIZES[:4], GRID, seed, grouped=grouped)
    found = allocate_ilp(table, budget)
    expected = cheapest_by_enumeration(table, budget)
    assert found.objective == pytest.approx(expected, rel=1e-12)
    assert found.proven_optimal
    assert within(found.plan, budget)
    assert shared(found.plan, table.groups)


@pytest.mark.parametrize("mean_bits", [2.0, 2.6, 3.1, 4.4])
@pytest.mark.parametrize("seed", range(3))
def test_ilp_with_groups_is_as_good_as_brute_force(mean_bits: float, seed: int) -> None:
    table = table_of(SIZES, CHAIN, seed, grouped=True)
    found = allocate_ilp(table, Budget(mean_bits))
    expected = cheapest_by_enumeration(table, Budget(mean_bits))
    assert found.objective == pytest.approx(expected, rel=1e-12)
    assert shared(found.plan, table.groups)


def test_ilp_with_an_activation_budget_counts_layers_not_weights() -> None:
    # one layer may have the wide input: the better gain wins although that layer is the largest
    choices = (LayerBits(3, 2), LayerBits(3, 4))
    cost = np.array([[9.0, 0.0], [5.0, 0.0], [5.0, 0.0]])
    table = CostTable(layers_of((1000, 1, 1)), choices, cost)
    plan = allocate_ilp(table, Budget(3.0, 8 / 3)).plan
    assert [bits.activation for bits in plan.widths] == [4, 2, 2]


two_budgets = given(
    mean=st.floats(2.0, 5.0),
    act=st.floats(2.0, 4.0),
    seed=st.integers(0, 10**6),
    grouped=st.booleans(),
    allocator=st.sampled_from(["ilp", "random", "uniform", "vtptq"]),
)


@two_budgets
def test_no_allocator_exceeds_either_budget_or_splits_a_group(
    mean: float, act: float, seed: int, grouped: bool, allocator: str
) -> None:
    table = table_of((3, 1, 4, 4) * 3, GRID, seed, grouped=grouped)
    budget = Budget(mean, act)
    options = {"configurations": 5} if allocator == "vtptq" else {}
    found = ALLOCATORS.get(allocator)(table, budget, **options)
    assert within(found.plan, budget)
    assert shared(found.plan, table.groups)
    rows = np.arange(len(table.layers))
    columns = [table.choices.index(bits) for bits in found.plan.widths]
    assert found.objective == pytest.approx(float(table.cost[rows, columns].sum()))
    assert found.proven_optimal == (allocator == "ilp")


@pytest.mark.parametrize("allocator", list(ALLOCATORS))
@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (Budget(1.5, 4.0), r"no assignment averages 1\.5 bits: the narrowest choice is 2 bits"),
        (
            Budget(5.0, 1.9),
            r"no assignment averages 1\.9 activation bits: the narrowest choice is 2 bits",
        ),
    ],
    ids=["weights", "inputs"],
)
def test_an_infeasible_budget_is_one_sentence(allocator: str, budget: Budget, message: str) -> None:
    with pytest.raises(BudgetError, match=f"^{message}$"):
        ALLOCATORS.get(allocator)(table_of(SIZES, GRID, 0), budget)


def test_uniform_of_choices_that_fit_only_in_a_mixture_is_refused() -> None:
    choices = (LayerBits(2, 8), LayerBits(8, 2))
    with pytest.raises(BudgetError, match="no single choice for all layers is within"):
        ALLOCATORS.get("uniform")(table_of(SIZES, choices, 0), Budget(5.0, 5.0))


def test_random_plans_that_cannot_be_brought_within_both_budgets_are_refused() -> None:
    choices = (LayerBits(2, 8), LayerBits(8, 2))
    with pytest.raises(BudgetError):
        allocate_random(table_of(SIZES, choices, 0), Budget(2.1, 2.1))


def test_the_random_allocator_is_seeded_and_says_what_it_is() -> None:
    table, budget = table_of((3, 1, 4, 4) * 3, GRID, 0), Budget(3.0, 3.0)
    plans = [allocate_random(table, budget, seed=s) for s in (0, 0, 1, 2, 3)]
    assert plans[0] == plans[1]
    assert len({found.plan.widths for found in plans}) > 2
    assert (plans[0].status, plans[0].proven_optimal) == ("random", False)


def test_no_width_of_a_random_plan_could_be_widened() -> None:
    table, budget = table_of((3, 1, 4, 4) * 3, GRID, 0), Budget(3.3, 2.9)
    plan = allocate_random(table, budget, seed=4).plan
    for name, bits in plan.items():
        for step in wider(bits, GRID):
            assert not within(plan.with_bits(name, step), budget)


def test_more_configurations_are_never_dearer_and_never_beat_the_optimum() -> None:
    table, budget = table_of((3, 1, 4, 4) * 2, CHAIN, 1, grouped=True), Budget(3.2)
    costs = [
        allocate_sampled(table, budget, configurations=n, seed=3).objective for n in (1, 10, 519)
    ]
    assert costs[0] > costs[1] >= costs[2]
    best = allocate_ilp(table, budget).objective
    assert costs[2] >= best * (1 - 1e-12)
    # four modules of four widths: 519 draws find the optimum or come near it
    assert costs[2] <= 1.3 * best
    assert allocate_sampled(table, budget).status == "sampled"


def test_the_front_has_the_points_that_none_beats_in_both() -> None:
    points = [(3.0, 5), (1.0, 9), (2.0, 9), (2.0, 7), (4.0, 5), (5.0, 1)]
    assert [points[i] for i in pareto_front(points)] == [(1.0, 9), (2.0, 7), (3.0, 5), (5.0, 1)]


def test_steps_of_separate_widths_move_one_width_at_a_time() -> None:
    assert wider(LayerBits(3, 2), GRID) == (LayerBits(3, 4), LayerBits(5, 2))
    assert narrower(LayerBits(3, 4), GRID) == (LayerBits(2, 4), LayerBits(3, 2))
    assert wider(LayerBits(5, 4), GRID) == ()
    assert separate(GRID)
    assert not separate(CHAIN)


def test_steps_of_joint_widths_follow_the_chain_also_where_inputs_stop_at_eight() -> None:
    chain = (LayerBits(2, 6), LayerBits(4, 8), LayerBits(5, 8))
    assert wider(chain[0], chain) == (chain[1],)
    assert wider(chain[1], chain) == (chain[2],)
    assert narrower(chain[2], chain) == (chain[1],)


class Landscape:
    """Costs of a table as errors, and a noisy score of plans."""

    def __init__(self, table: CostTable, seed: int) -> None:
        self.table, self.seed = table, seed
        self.rows = {layer.name: i for i, layer in enumerate(table.layers)}

    def error_at(self, name: str, bits: LayerBits) -> float:
        return float(self.table.cost[self.rows[name], self.table.choices.index(bits)])

    def errors(self, plan: BitPlan) -> dict[str, float]:
        return {name: self.error_at(name, bits) for name, bits in plan.items()}

    def score(self, plan: BitPlan) -> float:
        drawn = [self.seed, *(b.weight * 10 + b.activation for b in plan.widths)]
        noise = np.random.default_rng(drawn).normal()
        return -sum(self.errors(plan).values()) * (1 + 0.3 * noise)


def exchanges(table: CostTable, budget: Budget, seed: int, **options: Any) -> list[Step]:
    land = Landscape(table, seed)
    start = allocate_random(table, budget, seed=seed).plan
    return list(
        refine(
            start,
            budget,
            choices=table.choices,
            errors=land.errors,
            error_at=land.error_at,
            score=land.score,
            options=RefineOptions(**{"patience": 5, "max_exchanges": 30, **options}),
            units=table.units,
        )
    )


@given(
    mean=st.floats(2.0, 5.0),
    act=st.floats(2.0, 4.0),
    seed=st.integers(0, 10**6),
    grouped=st.booleans(),
    ratios=st.sampled_from(["paper", "exact", "optimal", "measured"]),
    formula=st.sampled_from(["verbal", "printed"]),
)
def test_no_exchange_exceeds_either_budget_or_splits_a_group(
    mean: float, act: float, seed: int, grouped: bool, ratios: str, formula: str
) -> None:
    table = table_of((3, 1, 4, 4) * 3, GRID, seed, grouped=grouped)
    budget = Budget(mean, act)
    for step in exchanges(table, budget, seed, ratios=ratios, gain_formula=formula):
        assert within(step.plan, budget)
        assert shared(step.plan, table.groups)


@given(act=st.floats(2.0, 4.0), seed=st.integers(0, 10**6))
def test_unweighted_exchanges_keep_the_activation_budget(act: float, seed: int) -> None:
    table = table_of((3, 1, 4, 4) * 3, GRID, seed)
    budget = Budget(3.0, act)
    for step in exchanges(table, budget, seed, swap_budget="unweighted"):
        assert within(step.plan, Budget(8.0, act))


def test_exchanges_move_weight_bits_and_activation_bits() -> None:
    table = table_of((3, 1, 4, 4) * 3, GRID, 1)
    steps = exchanges(table, Budget(3.0, 3.0), 1, patience=40, max_exchanges=80, ratios="measured")
    assert {step.moved for step in steps} == {"weight", "activation"}
    plan = allocate_random(table, Budget(3.0, 3.0), seed=1).plan
    for step in steps:
        for name in step.widened:
            before, after = plan[name], step.plan[name]
            moved = "weight" if after.weight > before.weight else "activation"
            assert step.moved == moved
            assert before.within(after)
        plan = step.plan if step.accepted else plan


def test_layers_of_a_group_are_widened_and_narrowed_together() -> None:
    table = table_of((3, 1, 4, 4) * 3, CHAIN, 2, grouped=True)
    steps = exchanges(table, Budget(3.5), 2, ratios="measured", patience=20)
    assert steps
    for step in steps:
        assert step.widened in table.groups
        assert set(step.narrowed) == {n for g in table.groups if g[0] in step.narrowed for n in g}


def test_the_gain_of_a_group_is_the_sum_of_its_layers() -> None:
    table = table_of((4, 4, 4, 4), CHAIN, 3, grouped=True)
    land = Landscape(table, 0)
    plan = BitPlan.uniform(table.layers, CHAIN[0])
    options = RefineOptions(ratios="paper")
    gains, _ = gains_and_harms(plan, CHAIN, land.errors(plan), land.error_at, options, table.units)
    # the paper's ratio of three bits is 6.59
    expected = [float(table.cost[i : i + 2, 0].sum()) * (1 - 1 / 6.59) for i in (0, 2)]
    assert list(gains.values()) == pytest.approx(expected)


def test_the_expected_error_of_two_widths_is_that_of_random_numbers() -> None:
    # the expectation of (w' x' - w x)**2 for normal w and x inside the clipping range
    random = np.random.default_rng(0)
    w, x = random.normal(size=(2, 4_000_000))
    inside = (np.abs(w) < 3) & (np.abs(x) < 3)

    def rounded(values: np.ndarray, bits: int) -> np.ndarray:
        step = 6 / (2**bits - 1)
        return np.round((values + 3) / step) * step - 3

    found = np.mean(inside * (rounded(w, 2) * rounded(x, 4) - w * x) ** 2)
    # the paper integrates over the range alone, but takes the power of w and x for one, not 0.97
    assert expected_error(2, 4) == pytest.approx(found, rel=0.04)
    assert expected_error(2, 4) == pytest.approx(expected_error(4, 2), rel=1e-12)
    assert expected_error(3, 3) == pytest.approx(expected_error(3), rel=1e-12)


@pytest.mark.parametrize("table", ["paper", "exact", "optimal"])
def test_the_ratio_of_equal_widths_is_that_of_one_width(table: Any) -> None:
    narrow, wide = LayerBits(3, 3), LayerBits(5, 5)
    apart, together = (step_ratio(narrow, wide, table, apart=a) for a in (True, False))
    assert apart == pytest.approx(together, rel=1e-9)


def test_a_step_of_one_width_alone_removes_less_than_a_step_of_both() -> None:
    one, both = (
        step_ratio(LayerBits(3, 3), to, "paper", apart=True)
        for to in (LayerBits(4, 3), LayerBits(4, 4))
    )
    # the mean of 1 / 4.70 and 1, by hand
    assert one == pytest.approx(2 / (1 / 4.70 + 1))
    assert 1 < one < both == pytest.approx(4.70)


@pytest.mark.parametrize(
    ("groups", "name"),
    [((("head",),), "head"), ((("blocks.0.qkv",), ("blocks.0.qkv",)), r"blocks\.0\.qkv")],
    ids=["unknown", "twice"],
)
def test_a_group_names_layers_of_the_table_once(
    groups: tuple[tuple[str, ...], ...], name: str
) -> None:
    with pytest.raises(ConfigError, match=f"must name '{name}' once"):
        CostTable(layers_of((1, 2)), CHAIN, np.zeros((2, 4)), groups)


def test_units_are_groups_and_single_layers_in_graph_order() -> None:
    layers = layers_of((1, 2, 3, 4))
    names = [layer.name for layer in layers]
    table = CostTable(layers, CHAIN, np.zeros((4, 4)), ((names[1], names[3]),))
    assert table.units == ((names[0],), (names[1], names[3]), (names[2],))


# --- the whole run

APART: dict[str, Any] = {
    "method": "minmax",
    "choices": [2, 3, 4],
    "act_choices": [2, 4],
    "bits": 3,
    "joint": False,
    "exchanges": 8,
    "patience": 3,
}
quiet = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def done(vit: Case) -> Result:
    """A quick run on the tiny ViT."""
    return quantize(vit.original, vit.samples, **APART)


def test_a_run_keeps_both_budgets(done: Result) -> None:
    assert done.budget == Budget(3.0, 3.0)
    assert within(done.plan, done.budget)
    assert all(within(step.plan, done.budget) for step in done.steps)
    assert {bits.activation for bits in done.plan.widths} <= {2, 4}
    assert done.uniform.widths[0] == LayerBits(3, 2)


def test_the_model_has_both_widths_of_the_plan(done: Result) -> None:
    assert any(bits.weight != bits.activation for bits in done.plan.widths)
    for name, bits in done.plan.items():
        layer = done.model.get_submodule(name)
        assert (layer.weight_quantizer.bits, layer.input_quantizer.bits) == (
            bits.weight,
            bits.activation,
        )


@quiet
@pytest.mark.parametrize("metric", list(METRICS))
def test_every_metric_leads_to_a_plan_of_separate_widths(vit: Case, metric: str) -> None:
    result = quantize(vit.original, vit.samples, **{**APART, "metric": metric, "exchanges": 3})
    assert within(result.plan, result.budget)
    assert result.sensitivity is not None
    cost = result.sensitivity.table.cost
    if metric != "loss":  # the labels of a random model say nothing
        # the wide input is preferred at the same weight, in sum over the layers
        assert cost[:, 0].sum() > cost[:, 1].sum()


@quiet
@pytest.mark.parametrize("allocator", list(ALLOCATORS))
def test_every_allocator_leads_to_a_plan_of_the_runs_seed(vit: Case, allocator: str) -> None:
    options = {**APART, "metric": "nuclear", "allocator": allocator, "exchanges": 0, "seed": 3}
    result = quantize(vit.original, vit.samples, **options)
    assert result.sensitivity is not None
    assert result.allocation is not None
    assert within(result.allocation.plan, result.budget)
    assert shared(result.allocation.plan, result.sensitivity.table.groups)
    assert result.allocation.proven_optimal == (allocator == "ilp")
    if allocator == "random":
        expected = allocate_random(result.sensitivity.table, result.budget, seed=3)
        assert result.allocation.plan == expected.plan
        assert (
            result.allocation.plan
            != allocate_random(result.sensitivity.table, result.budget, seed=4).plan
        )


@quiet
def test_the_number_of_configurations_reaches_the_allocator(vit: Case) -> None:
    options = {**APART, "metric": "nuclear", "allocator": "vtptq", "exchanges": 0}
    few = quantize(vit.original, vit.samples, **options, configurations=2)
    assert few.sensitivity is not None
    expected = allocate_sampled(few.sensitivity.table, few.budget, configurations=2, seed=0)
    assert few.allocation == expected


def test_a_target_size_keeps_the_activation_budget(vit: Case, tmp_path: Path) -> None:
    options = {**APART, "exchanges": 2}
    whole = quantize(vit.original, vit.samples, **options)
    whole.save(tmp_path / "whole")
    target = (tmp_path / "whole").stat().st_size
    result = quantize(vit.original, vit.samples, **options, target_size=target)
    result.save(tmp_path / "sized")
    assert (tmp_path / "sized").stat().st_size <= target
    assert result.plan.mean_activation_bits <= 3


def test_a_plan_of_separate_widths_is_read_back(vit: Case, done: Result, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_json(done.plan)))
    given_plan = read_plan(path)
    assert given_plan == dict(done.plan)
    again = quantize(vit.original, vit.samples, plan=given_plan, **APART)
    with torch.no_grad():
        assert torch.equal(again.model(vit.samples.images), done.model(vit.samples.images))


def test_a_given_plan_over_the_activation_budget_is_noticed(vit: Case) -> None:
    plan = {layer.name: LayerBits(3, 5) for layer in vit.graph.allocatable}
    result = quantize(vit.original, vit.samples, plan=plan, **APART)
    assert result.notices == (
        "the given plan averages 5.0000 activation bits, the budget allows 3.0000",
    )


def test_a_checkpoint_of_separate_widths_is_loaded(vit: Case, done: Result, tmp_path: Path) -> None:
    done.save(tmp_path / "model.safetensors")
    loaded = lampq.load(tmp_path / "model.safetensors", vit.original)
    with torch.no_grad():
        assert torch.equal(loaded(vit.samples.images), done.model(vit.samples.images))


def test_the_report_states_both_budgets_and_means(done: Result) -> None:
    report = build_report(done, scores={}, seconds={}, files={}, float_bytes=1, extra={})
    assert report["bits"]["target_activation"] == 3.0
    assert report["bits"]["mean_activation_searched"] == done.plan.mean_activation_bits
    assert report["plan"]["mean_activation_bits"] == done.plan.mean_activation_bits
    assert report["config"]["act_choices"] == [2, 4]
    for entry, step in zip(report["exchanges"], done.steps, strict=True):
        assert entry["moved"] == step.moved
        assert entry["mean_activation_bits"] == step.plan.mean_activation_bits <= 3.0
    assert "of the layers' inputs" in report_markdown(report, done.plan)
    assert "(at most 3)" in report_markdown(report, done.plan)


def test_a_resumed_run_of_separate_widths_ends_alike(
    vit: Case, done: Result, tmp_path: Path
) -> None:
    run = Run(journal=Journal(tmp_path / "j"), store=FitFolder(tmp_path / "fits"))
    quantize(vit.original, vit.samples, run=run, **APART)
    again = Run(journal=Journal(tmp_path / "j"), store=FitFolder(tmp_path / "fits"))
    resumed = quantize(vit.original, vit.samples, run=again, **APART)
    assert (resumed.plan, resumed.steps) == (done.plan, done.steps)


def test_widths_of_a_configuration_are_all_pairs() -> None:
    config = make_config({"bits": 3, "choices": [3, 2], "joint": False})
    assert [str(bits) for bits in config.widths] == ["2/2", "2/3", "2/4", "3/2", "3/3", "3/4"]
    assert config.mean_activation_bits == 3.0
    assert make_config({"bits": 3, "act_bits": 5, "joint": False}).mean_activation_bits == 5.0
    assert make_config({"bits": 3, "act_bits": 5}).mean_activation_bits is None
    wide = make_config({"bits": 4, "act_bits": 8, "choices": [4], "joint": False})
    assert [str(bits) for bits in wide.widths] == ["4/7", "4/8", "4/9"]


def test_a_configuration_of_separate_widths_survives_json() -> None:
    config = make_config({"bits": 3, "choices": [2, 3], "joint": False})
    again = make_config(json.loads(json.dumps(config.to_json())))
    assert again.widths == config.widths
    assert again.to_json() == config.to_json()


def test_activation_choices_that_no_plan_can_average_are_refused_early(vit: Case) -> None:
    options = {**APART, "act_choices": [4, 5], "target_size": 10**9}
    with pytest.raises(BudgetError, match="averages 3 activation bits: the narrowest choice is 4"):
        quantize(vit.original, vit.samples, **options)
