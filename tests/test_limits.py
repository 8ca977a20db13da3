"""Limits on bytes and bit operations, against files and counts by hand."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import Case
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lampq import quantize
from lampq.allocate import allocate_ilp, allocate_random, check_feasible
from lampq.config import make_config
from lampq.data import Preprocessing
from lampq.errors import BudgetError, ConfigError
from lampq.limits import bops_limit, size_limit
from lampq.methods import METHODS, FitCache, SiteWidths
from lampq.methods.psaq import psaq
from lampq.models import ModelSource
from lampq.pipeline import Result, packed
from lampq.prepare import prepare
from lampq.refine import RefineOptions, refine
from lampq.types import BitPlan, Budget, CostTable, LayerBits, LayerRole, LayerSpec, Limit

CHOICES = tuple(LayerBits(b, b) for b in (1, 2, 3, 4, 8))
USER = ModelSource("user", "Tiny", {})
# numbers that take as many characters as numbers can
LONG = Preprocessing((-1.2345678901234567e-05,) * 3, (1.2345678901234567e-05,) * 3, 1 / 3 * 0.1)


def fits_of(case: Case, method: str, sites: SiteWidths) -> FitCache:
    return FitCache(case.model, case.graph, METHODS.get(method)(), case.stats, sites)


@pytest.mark.parametrize(
    ("name", "method", "matmul", "widths"),
    [
        ("swin", "minmax", 4, (1, 4, 8)),
        ("vit", "adalog", None, (1, 4, 8)),
        ("vit", "psaq", 4, (2, 9, 10)),
        ("swin", "psaq", None, (3, 8, 10)),
    ],
)
def test_the_bytes_of_a_limit_are_those_of_the_file(
    request: pytest.FixtureRequest,
    name: str,
    method: str,
    matmul: int | None,
    widths: tuple[int, ...],
) -> None:
    case: Case = request.getfixturevalue(name)
    fits = fits_of(case, method, SiteWidths(LayerBits(8, 8), matmul, rest=16))
    config = make_config({"method": method})

    def write(plan: BitPlan, how: Preprocessing | None = None) -> bytes:
        return packed(fits.assembled(plan), USER, plan, config, how)

    layers = fits.graph.allocatable
    choices = tuple(LayerBits(b, b) for b in widths)
    limit = size_limit(fits, write, choices, 99_999)
    for seed in range(4):
        random = np.random.default_rng(seed)
        drawn = tuple(choices[i] for i in random.integers(len(choices), size=len(layers)))
        plan = BitPlan(layers, drawn)
        # room for preprocessing, and for offsets of as many digits as the limit
        tensors = len(fits.assembled(plan).state_dict())
        assert 0 <= limit.of(plan) - len(write(plan)) <= 264 + 6 * tensors
        assert len(write(plan, LONG)) <= limit.of(plan)


def test_bit_operations_are_multiplications_times_both_widths(vit: Case) -> None:
    fits = fits_of(vit, "minmax", SiteWidths(LayerBits(6, 5), 3))
    limit = bops_limit(fits, vit.samples, CHOICES, 10**9)
    tokens, width = 17, 24  # sixteen patches of 8 x 8 and the class token
    sizes = {"qkv": 3 * width**2, "proj": width**2, "fc1": 4 * width**2, "fc2": 4 * width**2}
    for layer in vit.graph.allocatable:
        for bits in CHOICES:
            expected = tokens * sizes[layer.role.value] * bits.weight * bits.activation
            assert limit.amounts[layer.name, bits] == expected
    pictures = 16 * (3 * 8 * 8) * width * 6 * 8  # minmax gives pictures eight bits
    head = width * 10 * 6 * 5
    products = 2 * 2 * tokens * tokens * width * 9  # two blocks, two products, three bits
    assert limit.fixed == pictures + head + products


def test_what_is_not_quantized_counts_at_32_bits(vit: Case) -> None:
    fits = fits_of(vit, "adalog", SiteWidths(LayerBits(8, 8), 4))
    pictures = 16 * (3 * 8 * 8) * 24 * 8 * 32
    head, products = 24 * 10 * 64, 2 * 2 * 17 * 17 * 24 * 16
    assert bops_limit(fits, vit.samples, CHOICES, 1).fixed == pictures + head + products
    in_float = FitCache(
        vit.model, replace(vit.graph, matmuls=()), METHODS.get("adalog")(), vit.stats, fits.sites
    )
    expected = pictures + head + products // 16 * 32 * 32
    assert bops_limit(in_float, vit.samples, CHOICES, 1).fixed == expected


def test_operands_that_stay_in_float_count_at_32_bits_each(vit: Case) -> None:
    """Of psaq at the inputs the softmax is in float, and everything else is quantized."""
    sites = SiteWidths(LayerBits(8, 8), 5)
    fits = FitCache(vit.model, vit.graph, psaq("inputs"), vit.stats, sites)
    edges = 16 * (3 * 8 * 8) * 24 * 8 * 8 + 24 * 10 * 64
    multiplications = 2 * 17 * 17 * 24  # of one kind of product in two blocks
    expected = edges + multiplications * (5 * 5 + 32 * 5)
    assert bops_limit(fits, vit.samples, CHOICES, 1).fixed == expected


def test_products_of_a_quantized_output_count_with_its_layer(vit: Case) -> None:
    """Published psaq has q, k and v on the grid of the qkv output, which follows the plan."""
    choices = (LayerBits(4, 8), LayerBits(6, 10))
    fits = fits_of(vit, "psaq", SiteWidths(LayerBits(8, 8), 5))
    limit = bops_limit(fits, vit.samples, choices, 1)
    assert limit.fixed == 16 * (3 * 8 * 8) * 24 * 8 * 8 + 24 * 10 * 64
    product = 17 * 17 * 24
    for layer in vit.graph.allocatable:
        for bits in choices:
            expected = 17 * layer.n_params * bits.weight * bits.activation
            if layer.role is LayerRole.QKV:
                expected += product * bits.activation * (bits.activation + 32)
            assert limit.amounts[layer.name, bits] == expected


def test_norms_of_queries_and_keys_make_them_float_again(vit: Case) -> None:
    opened = copy.deepcopy(vit.model)
    opened.get_submodule("blocks.0.attn").q_norm = nn.LayerNorm(8)
    sites = SiteWidths(LayerBits(8, 8), 5)
    fits = FitCache(opened, vit.graph, METHODS.get("psaq")(), vit.stats, sites)
    plain = fits_of(vit, "psaq", sites)
    limits = [bops_limit(one, vit.samples, CHOICES, 1) for one in (fits, plain)]
    product = 17 * 17 * 24
    assert limits[0].fixed - limits[1].fixed == product * 32 * 32
    for bits in CHOICES:
        amounts = [limit.amounts["blocks.0.attn.qkv", bits] for limit in limits]
        assert amounts[1] - amounts[0] == product * bits.activation**2


def table(seed: int, layers: int = 5) -> CostTable:
    random = np.random.default_rng(seed)
    specs = tuple(
        LayerSpec(f"layer{i}", LayerRole.FC1, i, int(size))
        for i, size in enumerate(random.integers(20, 60, size=layers))
    )
    cost = np.sort(random.lognormal(size=(layers, len(CHOICES))))[:, ::-1].copy()
    return CostTable(specs, CHOICES, cost)


def limits(costs: CostTable, seed: int, share: float) -> tuple[Limit, ...]:
    """Two limits with amounts that have no common factor, somewhere in their range."""
    random = np.random.default_rng(seed + 1)
    found = []
    for name in ("bytes", "BOPs"):
        amounts = {
            (layer.name, bits): int(layer.n_params * bits.weight * 131 + random.integers(97))
            for layer in costs.layers
            for bits in CHOICES
        }
        ends = [
            sum(pick(amounts[layer.name, bits] for bits in CHOICES) for layer in costs.layers)
            for pick in (min, max)
        ]
        found.append(Limit(name, 50 + int(ends[0] + share * (ends[1] - ends[0])), amounts, 50))
    return tuple(found)


@given(seed=st.integers(0, 10**6), share=st.floats(0.0, 1.0))
def test_the_solver_keeps_all_limits_and_is_as_good_as_brute_force(seed: int, share: float) -> None:
    costs = table(seed, layers=4)
    budget = Budget(5.0, None, limits(costs, seed, share))
    plans = [
        (BitPlan(costs.layers, tuple(CHOICES[i] for i in columns)), columns)
        for columns in itertools.product(range(len(CHOICES)), repeat=4)
    ]
    cheapest = min(
        float(costs.cost[np.arange(4), list(columns)].sum())
        for plan, columns in plans
        if budget.allows(plan)
    )
    found = allocate_ilp(costs, budget)
    assert budget.allows(found.plan)
    assert found.objective == pytest.approx(cheapest, rel=1e-6)


def test_large_amounts_are_counted_in_units_that_the_solver_can_tell_apart() -> None:
    costs = table(0, layers=24)
    amounts = {
        (layer.name, bits): layer.n_params * bits.weight * 10_007 + i
        for i, layer in enumerate(costs.layers)
        for bits in CHOICES
    }
    least = sum(amounts[layer.name, CHOICES[0]] for layer in costs.layers)
    for most in (least, least + 1, 2 * least + 12_345, 3 * least + 1):
        budget = Budget(8.0, None, (Limit("bytes", most, amounts),))
        plan = allocate_ilp(costs, budget).plan
        assert budget.allows(plan)
        # nothing worth mentioning is left over
        narrowest = min(layer.n_params for layer in costs.layers) * 10_007
        assert most == least or most - budget.limits[0].of(plan) < max(narrowest * 6, most - least)


@given(seed=st.integers(0, 10**6), share=st.floats(0.1, 0.9))
def test_random_plans_and_exchanges_keep_all_limits(seed: int, share: float) -> None:
    costs = table(seed)
    budget = Budget(6.0, None, limits(costs, seed, share))
    plan = allocate_random(costs, budget, seed=seed).plan
    rows = {layer.name: i for i, layer in enumerate(costs.layers)}

    def error_at(name: str, bits: LayerBits) -> float:
        return float(costs.cost[rows[name], CHOICES.index(bits)])

    steps = refine(
        plan,
        budget,
        choices=CHOICES,
        errors=lambda p: {name: error_at(name, bits) for name, bits in p.items()},
        error_at=error_at,
        score=lambda p: -sum(error_at(name, bits) for name, bits in p.items()),
        options=RefineOptions(ratios="measured", patience=3, max_exchanges=20),
    )
    for step in steps:
        assert budget.allows(step.plan)


def test_a_limit_that_nothing_fits_states_what_would() -> None:
    costs = table(3)
    (limit, _) = limits(costs, 3, 0.5)
    least = limit.fixed + sum(limit.amounts[layer.name, CHOICES[0]] for layer in costs.layers)
    tight = Limit("bytes", least - 1, limit.amounts, limit.fixed)
    expected = f"no assignment takes {least - 1} bytes or less: the narrowest choices take {least}"
    with pytest.raises(BudgetError, match=f"^{expected}$"):
        check_feasible(costs.layers, CHOICES, Budget(8.0, None, (tight,)))


def test_codes_that_have_no_room_are_told_before_anything_is_fitted(vit: Case) -> None:
    # two blocks of 12 * 24 * 24 weights, two bits each
    expected = "no assignment takes 3000 bytes or less: the codes .* alone take 3456$"
    with pytest.raises(BudgetError, match=expected):
        prepare(vit.original, make_config({"target_size": 3000, "choices": [2, 4]}))


QUICK: dict[str, Any] = {"method": "minmax", "choices": [2, 3, 4], "exchanges": 4, "patience": 1}


def bit_operations(result: Result) -> int:
    (limit,) = (one for one in result.budget.limits if one.name == "BOPs")
    return limit.of(result.plan)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_run_keeps_a_target_of_bit_operations_and_of_size(vit: Case, share: float) -> None:
    names = [layer.name for layer in vit.graph.allocatable]
    ends = [
        bit_operations(
            quantize(
                vit.original,
                vit.samples,
                plan=dict.fromkeys(names, LayerBits(width, width)),
                target_bops=10**9,
                **QUICK,
            )
        )
        for width in (2, 4)
    ]
    target = int(ends[0] + share * (ends[1] - ends[0]))
    result = quantize(vit.original, vit.samples, target_bops=target, target_size=25_500, **QUICK)
    assert bit_operations(result) <= target
    assert [limit.name for limit in result.budget.limits] == ["bytes", "BOPs"]
    size = len(packed(result.model, result.source, result.plan, result.config))
    assert size <= 25_500
    if share == 0:
        assert set(result.plan.values()) == {LayerBits(2, 2)}


@pytest.mark.parametrize("preset", ["best", "paper"])
def test_a_run_of_psaq_with_wide_layers_keeps_its_limits(vit: Case, preset: str) -> None:
    options: dict[str, Any] = {
        **QUICK,
        **{"method": "psaq", "preset": preset, "metric": "recon", "fallback": "none"},
        **{"choices": [8, 9, 10], "bits": 9},
    }
    names = [layer.name for layer in vit.graph.allocatable]
    plans = [dict.fromkeys(names, LayerBits(b, b)) for b in (8, 10)]
    free = {**options, "target_size": 10**6, "target_bops": 10**9}
    ends = [quantize(vit.original, vit.samples, plan=plan, **free) for plan in plans]
    targets = [
        (ends[0].budget.limits[i].of(ends[0].plan) + ends[1].budget.limits[i].of(ends[1].plan)) // 2
        for i in range(2)
    ]
    options |= {"target_size": targets[0], "target_bops": targets[1]}
    result = quantize(vit.original, vit.samples, **options)
    size, operations = result.budget.limits
    content = packed(result.model, result.source, result.plan, result.config)
    assert len(content) <= size.of(result.plan) <= targets[0]
    assert operations.of(result.plan) <= targets[1]
    assert 8 < result.plan.mean_weight_bits < 10


def test_a_given_plan_over_a_limit_is_noticed(vit: Case) -> None:
    names = [layer.name for layer in vit.graph.allocatable]
    plan = dict.fromkeys(names, LayerBits(5, 6))
    free = quantize(vit.original, vit.samples, plan=plan, target_bops=10**9, **QUICK)
    assert free.notices == ()
    taken = bit_operations(free)
    result = quantize(vit.original, vit.samples, plan=plan, target_bops=taken - 1, **QUICK)
    expected = f"the given plan takes {taken} BOPs, the budget allows {taken - 1}"
    assert result.notices == (expected,)


def test_products_that_follow_the_plan_cannot_be_limited() -> None:
    with pytest.raises(ConfigError, match="need a width of their own"):
        make_config({"target_bops": 10**9, "matmul_bits": "follow"})
