from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np
import pytest
from conftest import Case

from lampq.report import exchanges_json, plan_json
from lampq.report.content import (
    RunFiles,
    exchanges,
    finite,
    page_content,
    points,
    predicted_change,
    probes,
    sensitivity,
    stages,
)
from lampq.types import BitPlan, CostTable, LayerBits, LayerRole, LayerSpec, Step

LAYERS = (
    LayerSpec("patch", LayerRole.PATCH_EMBED, -1, 40),
    LayerSpec("0.qkv", LayerRole.QKV, 0, 30),
    LayerSpec("0.fc1", LayerRole.FC1, 0, 10),
    LayerSpec("head", LayerRole.HEAD, -1, 20),
)
SEARCHED = LAYERS[1:3]
TWO, THREE = LayerBits(2, 2), LayerBits(3, 3)
COSTS = CostTable(SEARCHED, (TWO, THREE), np.array([[4.0, 1.0], [2.0, 0.5]]))
PLAN = BitPlan(SEARCHED, (TWO, THREE))
START = BitPlan(SEARCHED, (THREE, TWO))
QUALITY = {"accuracy": 90.0, "likelihood": -0.3, "agreement": -0.2}


def report(**changes: Any) -> dict[str, Any]:
    """A report.json with what the page looks at."""
    return {
        "model": {"kind": "user", "name": "Tiny", "options": {}},
        "config": {"metric": "fisher", "accept": "kl"},
        "notices": [],
        "solver": {"status": "optimal", "proven_optimal": True, "objective": 4.5},
        "reconstruction": None,
        "seconds": {"fit": 1.0},
        "versions": {"lampq": "0"},
        "bits": {"target": 2.5, "target_activation": None, "mean_weight_searched": 2.25},
        "scores": {"mixed": {"top1": 80.0, "images": 100}},
        "calibration": dict.fromkeys(("fp32", "uniform", "mixed"), QUALITY),
        "files": {"model.safetensors": 1012},
        "float_bytes": 8000,
        "uniform_bytes": 900,
        "uniform_bits": 2.0,
        "plan": plan_json(PLAN),
        "initial_plan": plan_json(START),
        "exchanges": [],
        **changes,
    }


def files(**changes: Any) -> RunFiles:
    return RunFiles(
        report=report(**changes),
        layers=[(layer, dict(PLAN).get(layer.name, LayerBits(8, 8))) for layer in LAYERS],
        sensitivity={
            "choices": [[2, 2], [3, 3]],
            "cost": {"0.qkv": [4.0, 1.0], "0.fc1": [2.0, 0.5]},
            "details": {},
        },
    )


def test_the_content_is_plain_json() -> None:
    content = page_content(files())
    assert json.loads(json.dumps(content, allow_nan=False)) == content


def test_numbers_that_json_has_no_word_for_become_null() -> None:
    given = {"a": [math.nan, 1.0, (math.inf, "nan")], "b": {"c": -math.inf, "d": True}}
    assert finite(given) == {"a": [None, 1.0, [None, "nan"]], "b": {"c": None, "d": True}}


def test_plans_have_their_cost_and_the_size_of_their_file() -> None:
    plans = page_content(files())["plans"]
    assert plans["run"] == {"widths": [[2, 2], [3, 3]], "cost": 4.5, "bytes": 1012}
    # codes: 8 + 4 bytes in the run, 12 + 3 bytes before
    assert plans["initial"] == {"widths": [[3, 3], [2, 2]], "cost": 3.0, "bytes": 1015}


def test_layers_tell_whether_they_are_searched() -> None:
    found = page_content(files())["layers"]
    assert [layer["searched"] for layer in found] == [False, True, True, False]
    assert [layer["bits"] for layer in found] == [[8, 8], [2, 2], [3, 3], [8, 8]]


def test_a_given_plan_has_no_costs_no_curve_and_no_sensitivity() -> None:
    run = files(initial_plan=None)
    content = page_content(RunFiles(run.report, run.layers))
    assert content["plans"]["run"]["cost"] is None
    absent = {name: content[name] for name in ("frontier", "sensitivity", "probes", "histograms")}
    assert set(absent.values()) == {None}


@pytest.mark.parametrize(("kind", "named"), [("timm", "lampq bench"), ("detector", "lampq export")])
def test_the_command_that_is_named_for_speed_takes_the_model(kind: str, named: str) -> None:
    model = {"kind": kind, "name": "Tiny", "options": {}}
    said = page_content(files(model=model))["unmeasured_speed"]
    assert set(re.findall("lampq [a-z]+", said)) == {named}


def test_scores_have_their_interval() -> None:
    # from 71.1 to 86.7 %
    assert page_content(files())["scores"]["mixed"]["interval"] == pytest.approx(7.78, abs=0.01)


def test_the_score_of_another_run_stands_at_the_size_of_its_file() -> None:
    found = points("other", report())
    assert [(p["name"], p["bytes"], p["top1"]) for p in found] == [("other", 1012, 80.0)]
    assert points("unscored", report(scores={})) == []


def test_a_vit_has_one_stage_with_a_row_for_every_block(vit: Case) -> None:
    (rows,) = stages(vit.graph.layers)
    assert [row["block"] for row in rows] == [-1, 0, 1, -1]
    assert [list(row["layers"]) for row in rows] == [
        ["patch_embed"],
        *[["qkv", "proj", "fc1", "fc2"]] * 2,
        ["head"],
    ]


def test_a_reduction_starts_a_stage(swin: Case) -> None:
    first, second = stages(swin.graph.layers)
    assert [row["block"] for row in first] == [-1, 0, 1]
    assert [row["block"] for row in second] == [-1, 2, 3, -1]
    assert list(second[0]["layers"]) == ["reduction"]


def test_rows_name_every_layer_once(case: Case) -> None:
    rows = [row for stage in stages(case.graph.layers) for row in stage]
    numbers = [n for row in rows for some in row["layers"].values() for n in some]
    assert sorted(numbers) == list(range(len(case.graph.layers)))


def test_searched_layers_outside_the_blocks_have_rows_of_their_own() -> None:
    alone = [LayerSpec(f"extra.{i}", LayerRole.FC1, -1, 4) for i in range(2)]
    (rows,) = stages(alone)
    assert rows == [{"block": -1, "layers": {"fc1": [0]}}, {"block": -1, "layers": {"fc1": [1]}}]


def test_role_factors_take_the_traces_to_one_scale() -> None:
    details = {
        "fisher_trace": {"0.qkv": 8.0, "0.fc1": 3.0},
        "role_scale": {"qkv": 0.5, "fc1": 10.0},
    }
    found = sensitivity(COSTS, details)
    assert found["before"] == [8.0, 3.0]
    assert found["after"] == [4.0, 30.0]


def test_a_metric_without_role_factors_has_no_before_and_after() -> None:
    found = sensitivity(COSTS, {"form": "both"})
    assert found["before"] is None
    assert found["after"] is None
    assert found["cost"] == [[4.0, 1.0], [2.0, 0.5]]


def test_probes_stand_beside_what_the_metric_expects() -> None:
    details = {
        "fisher_trace": {"0.qkv": 8.0, "0.fc1": 3.0},
        "role_scale": {"qkv": 0.5, "fc1": 10.0},
        "probe": {"bits": 2, "signal": "kl", "drop": {"0.fc1": 0.7}},
    }
    assert probes(COSTS, details) == {
        "bits": 2,
        "signal": "kl",
        "layers": [{"layer": 1, "predicted": 30.0, "measured": 0.7}],
    }
    assert probes(COSTS, {"form": "both"}) is None


def test_the_predicted_change_is_the_difference_of_costs() -> None:
    changes = {"0.qkv": {"from": [3, 3], "to": [2, 2]}, "0.fc1": {"from": [2, 2], "to": [3, 3]}}
    # 4 - 1 + 0.5 - 2
    assert predicted_change(changes, COSTS) == pytest.approx(1.5)
    assert predicted_change(None, COSTS) is None


def test_an_exchange_is_measured_against_the_best_plan_of_its_time() -> None:
    step = {"widened": ["0.fc1"], "narrowed": ["0.qkv"], "changes": None}
    tried = [
        {**step, "score": -0.5, "accepted": False},
        {**step, "score": -0.3, "accepted": True},
        {**step, "score": -0.2, "accepted": True},
    ]
    calibration = {**dict.fromkeys(("uniform",), QUALITY), "start": {"agreement": -0.4}}
    found = exchanges(report(exchanges=tried, calibration=calibration), COSTS)
    assert found["start"] == -0.4
    assert [s["gained"] for s in found["steps"]] == pytest.approx([-0.1, 0.1, 0.1])


def test_changes_of_an_exchange_are_those_of_the_plan_of_its_time() -> None:
    both = BitPlan(SEARCHED, (TWO, TWO))
    steps = [
        Step(("0.fc1",), ("0.qkv",), PLAN, 0.1, accepted=False),
        Step((), ("0.qkv",), both, 0.3, accepted=True),
        Step(("0.fc1",), (), PLAN, 0.2, accepted=False),
    ]
    assert [step["changes"] for step in exchanges_json(START, steps)] == [
        {"0.qkv": {"from": [3, 3], "to": [2, 2]}, "0.fc1": {"from": [2, 2], "to": [3, 3]}},
        {"0.qkv": {"from": [3, 3], "to": [2, 2]}},
        {"0.fc1": {"from": [2, 2], "to": [3, 3]}},
    ]
