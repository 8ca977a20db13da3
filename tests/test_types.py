from __future__ import annotations

import numpy as np
import pytest

from lampq.errors import BudgetError, ConfigError, GraphError
from lampq.types import (
    BitPlan,
    Budget,
    CostTable,
    LayerBits,
    LayerRole,
    LayerSpec,
    MatmulSpec,
    ModelGraph,
)

QKV = LayerSpec("b.qkv", LayerRole.QKV, 0, 300)
PROJ = LayerSpec("b.proj", LayerRole.PROJ, 0, 100)
HEAD = LayerSpec("head", LayerRole.HEAD, -1, 50)
LAYERS = (QKV, PROJ)
TWO, FOUR = LayerBits(2, 2), LayerBits(4, 4)


@pytest.mark.parametrize("bits", [0, 11, -1])
@pytest.mark.parametrize("kind", ["weight", "activation"])
def test_a_width_outside_one_to_ten_is_refused_with_its_value(kind: str, bits: int) -> None:
    widths = {"weight": 4, "activation": 4, kind: bits}
    with pytest.raises(ConfigError, match=rf"{kind} bits must be in 1\.\.10, got {bits}"):
        LayerBits(**widths)


def test_widths_are_ordered_by_weight_first() -> None:
    assert sorted([LayerBits(4, 2), LayerBits(2, 8), LayerBits(2, 4)]) == [
        LayerBits(2, 4),
        LayerBits(2, 8),
        LayerBits(4, 2),
    ]


def test_a_width_prints_as_weight_and_activation() -> None:
    assert str(LayerBits(3, 8)) == "3/8"


def test_a_graph_names_a_site_that_is_matched_twice() -> None:
    with pytest.raises(GraphError, match=r"'b\.qkv' more than once"):
        ModelGraph((QKV, QKV), (), ("b",))


def test_a_layer_and_a_matmul_may_not_share_a_name() -> None:
    with pytest.raises(GraphError, match=r"'b\.qkv' more than once"):
        ModelGraph((QKV,), (MatmulSpec("b.qkv", "qk", 0),), ("b",))


def test_the_head_is_fixed_and_the_block_layers_are_searched() -> None:
    graph = ModelGraph((*LAYERS, HEAD), (), ("b",))
    assert graph.allocatable == LAYERS
    assert graph.fixed == (HEAD,)


def test_a_graph_finds_a_layer_by_name() -> None:
    assert ModelGraph(LAYERS, (), ("b",)).layer("b.proj") is PROJ


def test_a_graph_names_the_layer_it_does_not_have() -> None:
    with pytest.raises(GraphError, match=r"'b\.fc1'"):
        ModelGraph(LAYERS, (), ("b",)).layer("b.fc1")


def test_a_plan_is_a_mapping_in_graph_order() -> None:
    plan = BitPlan(LAYERS, (TWO, FOUR))
    assert dict(plan) == {"b.qkv": TWO, "b.proj": FOUR}
    assert list(plan) == ["b.qkv", "b.proj"]
    assert len(plan) == 2


def test_a_plan_does_not_know_other_layers() -> None:
    plan = BitPlan(LAYERS, (TWO, FOUR))
    assert "head" not in plan
    with pytest.raises(KeyError):
        plan["head"]


@pytest.mark.parametrize("widths", [(), (TWO,), (TWO, TWO, TWO)], ids=["none", "one", "three"])
def test_a_plan_needs_one_width_per_layer(widths: tuple[LayerBits, ...]) -> None:
    with pytest.raises(ConfigError, match=f"got {len(widths)} for 2"):
        BitPlan(LAYERS, widths)


def test_a_plan_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="got 0 for 0"):
        BitPlan((), ())


def test_the_mean_weight_width_is_over_parameters() -> None:
    # 300 weights at 2 bits and 100 at 4: (600 + 400) / 400
    plan = BitPlan(LAYERS, (LayerBits(2, 8), LayerBits(4, 4)))
    assert plan.total_weight_bits == 1000
    assert plan.mean_weight_bits == 2.5


def test_the_mean_activation_width_is_over_layers() -> None:
    assert BitPlan(LAYERS, (LayerBits(2, 8), LayerBits(4, 4))).mean_activation_bits == 6


def test_changing_one_width_leaves_the_others_and_the_plan_itself() -> None:
    plan = BitPlan.uniform(LAYERS, FOUR)
    changed = plan.with_bits("b.proj", TWO)
    assert dict(changed) == {"b.qkv": FOUR, "b.proj": TWO}
    assert dict(plan) == {"b.qkv": FOUR, "b.proj": FOUR}


def test_changing_an_unknown_layer_is_refused() -> None:
    with pytest.raises(GraphError, match="'head'"):
        BitPlan.uniform(LAYERS, FOUR).with_bits("head", TWO)


@pytest.mark.parametrize("mean", [0.0, -1.0, float("inf"), float("nan")])
def test_a_budget_is_a_positive_finite_number(mean: float) -> None:
    with pytest.raises(BudgetError, match=f"got {mean}"):
        Budget(mean)


def test_a_budget_allows_its_own_mean_exactly() -> None:
    assert Budget(2.5).allows(BitPlan(LAYERS, (TWO, FOUR)))


def test_a_budget_refuses_one_bit_of_one_layer_more() -> None:
    assert not Budget(2.5).allows(BitPlan(LAYERS, (TWO, LayerBits(5, 4))))


def test_a_decimal_mean_is_not_lost_to_rounding() -> None:
    # a hundred weights take up exactly `hundredths` bits; 1.13 * 100 is 112.99999999999999
    layers = (LayerSpec("l", LayerRole.FC1, 0, 100),)
    for hundredths in range(100, 801):
        assert Budget(hundredths / 100).limit(layers) == hundredths


def test_a_budget_gives_back_a_plan_that_fits() -> None:
    plan = BitPlan.uniform(LAYERS, TWO)
    assert Budget(3).checked(plan) is plan


def test_a_plan_over_budget_is_refused_with_both_means() -> None:
    with pytest.raises(BudgetError, match=r"averages 4\.0000 bits, the budget allows 3\.0000"):
        Budget(3).checked(BitPlan.uniform(LAYERS, FOUR))


def test_a_cost_table_has_one_row_a_layer_and_one_column_a_choice() -> None:
    with pytest.raises(ConfigError, match=r"2 layers and 1 choices cannot have shape \(2, 2\)"):
        CostTable(LAYERS, (TWO,), np.zeros((2, 2)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_cost_that_is_not_finite_is_refused_by_layer(value: float) -> None:
    with pytest.raises(ConfigError, match=r"'b\.proj' is not finite"):
        CostTable(LAYERS, (TWO, FOUR), np.array([[0.0, 0.0], [0.0, value]]))


@pytest.mark.parametrize("choices", [(FOUR, TWO), (TWO, TWO)], ids=["falling", "equal"])
def test_the_choices_of_a_cost_table_ascend(choices: tuple[LayerBits, ...]) -> None:
    with pytest.raises(ConfigError, match="must ascend"):
        CostTable(LAYERS, choices, np.zeros((2, 2)))


def test_costs_need_not_fall_with_more_bits() -> None:
    table = CostTable(LAYERS, (TWO, FOUR), np.array([[0.0, 1.0], [1.0, 0.0]]))
    assert table.cost.shape == (2, 2)
