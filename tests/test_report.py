from __future__ import annotations

import json

import numpy as np
import pytest
from conftest import Case

from lampq import quantize
from lampq.pipeline import Result, packed
from lampq.quant.modules import QuantLayer
from lampq.report import (
    STAGES,
    bits_json,
    build_report,
    plan_json,
    plan_rows,
    report_markdown,
    sensitivity_json,
    uniform_bytes,
    versions,
)
from lampq.types import BitPlan, CostTable, LayerBits, LayerRole, LayerSpec

LAYERS = (
    LayerSpec("blocks.0.attn.qkv", LayerRole.QKV, 0, 30),
    LayerSpec("blocks.0.attn.proj", LayerRole.PROJ, 0, 10),
    LayerSpec("blocks.1.attn.qkv", LayerRole.QKV, 1, 30),
    LayerSpec("extra.fc1", LayerRole.FC1, -1, 30),
)
PLAN = BitPlan(LAYERS, (LayerBits(2, 2), LayerBits(3, 5), LayerBits(4, 4), LayerBits(8, 8)))


@pytest.fixture(scope="module")
def done(vit: Case) -> Result:
    """A quick run on the tiny ViT."""
    return quantize(
        vit.original, vit.samples, method="minmax", choices=[2, 3, 4], bits=3, exchanges=3
    )


def report_of(result: Result, **changes: object) -> dict[str, object]:
    arguments = {
        "scores": {"fp32": {"top1": 80.0, "images": 100}, "mixed": {"top1": 75.0, "images": 100}},
        "seconds": {"fit": 2.5},
        "files": {"model.safetensors": 1000},
        "float_bytes": 8000,
        "extra": {"uniform_bytes": 900},
    }
    return build_report(result, **{**arguments, **changes})  # type: ignore[arg-type]


def test_a_plan_is_written_with_both_widths_of_every_layer() -> None:
    content = json.loads(json.dumps(plan_json(PLAN)))
    assert list(content["layers"]) == [layer.name for layer in LAYERS]
    assert content["layers"]["blocks.0.attn.proj"] == {"weight": 3, "activation": 5}
    # (30 * 2 + 10 * 3 + 30 * 4 + 30 * 8) / 100
    assert content["mean_weight_bits"] == pytest.approx(4.5)


def test_a_cost_table_is_written_row_by_row() -> None:
    choices = (LayerBits(2, 2), LayerBits(4, 6))
    table = CostTable(LAYERS[:2], choices, np.array([[4.0, 3.0], [2.0, 1.0]]))
    content = json.loads(json.dumps(sensitivity_json(table, {"form": "projected"})))
    assert content == {
        "choices": [[2, 2], [4, 6]],
        "cost": {"blocks.0.attn.qkv": [4.0, 3.0], "blocks.0.attn.proj": [2.0, 1.0]},
        "details": {"form": "projected"},
    }


def test_rows_of_a_plan_are_by_block_and_name_unequal_widths() -> None:
    assert plan_rows(PLAN) == [
        ("-", {"fc1": "8"}),
        ("0", {"qkv": "2", "proj": "3/5"}),
        ("1", {"qkv": "4"}),
    ]


def test_the_report_is_plain_json(done: Result) -> None:
    report = report_of(done)
    assert json.loads(json.dumps(report)) == report


def test_every_stage_is_listed_also_if_it_took_no_time(done: Result) -> None:
    seconds = report_of(done)["seconds"]
    assert seconds == {**dict.fromkeys(STAGES, 0.0), "fit": 2.5}


def test_extra_entries_are_part_of_the_report(done: Result) -> None:
    assert report_of(done)["uniform_bytes"] == 900


def test_a_run_with_a_given_plan_reports_no_solver(vit: Case, done: Result) -> None:
    given = quantize(vit.original, vit.samples, plan=dict(done.plan), method="minmax", bits=3)
    report = report_of(given)
    assert report["initial_plan"] is None
    assert report["exchanges"] == []
    assert report["solver"] == {"status": "plan given", "proven_optimal": False, "objective": None}


def test_exchanges_are_reported_with_what_they_started_from(vit: Case, done: Result) -> None:
    assert done.start in (done.uniform, done.allocation.plan)
    first = report_of(done)["exchanges"][0]
    moved = {name for name, bits in done.steps[0].plan.items() if bits != done.start[name]}
    assert set(first["changes"]) == moved == {*first["widened"], *first["narrowed"]}
    accepted = [step.score for step in done.steps if step.accepted]
    # accepted steps beat the start in the order of their scores
    scores = [done.calibration["start"].agreement, *accepted]
    assert scores == sorted(set(scores))
    still = quantize(
        vit.original, vit.samples, method="minmax", choices=[2, 3, 4], bits=3, exchanges=0
    )
    assert (still.start, "start" in still.calibration) == (None, False)


def test_mean_widths_are_over_parameters(vit: Case, done: Result) -> None:
    found = bits_json(done.model, done.plan, 3.0, 16)
    sizes = {layer.name: layer.n_params for layer in vit.graph.layers}
    searched = {name: sizes[name] for name in done.plan}
    codes = sum(size * done.plan[name].weight for name, size in searched.items())
    edges = sum(size for name, size in sizes.items() if name not in done.plan)
    assert found["target"] == 3.0
    assert found["mean_weight_searched"] == pytest.approx(codes / sum(searched.values()))
    # patch embedding and head have eight bits
    quantized = (codes + 8 * edges) / sum(sizes.values())
    assert found["mean_weight_quantized"] == pytest.approx(quantized)
    total = sum(p.numel() for p in vit.original.parameters())
    whole = (codes + 8 * edges + 16 * (total - sum(sizes.values()))) / total
    assert found["mean_weight_all"] == pytest.approx(whole)


def test_the_mean_with_scales_adds_a_scale_and_a_zero_point_per_row(done: Result) -> None:
    found = bits_json(done.model, done.plan, 3.0, 16)
    layers = [m for m in done.model.modules() if isinstance(m, QuantLayer)]
    searched = [m for m in layers if m.spec.name in done.plan]
    rows = sum(m.codes.shape[0] for m in searched)
    weights = sum(m.codes.numel() for m in searched)
    extra = found["mean_weight_searched_with_scales"] - found["mean_weight_searched"]
    assert extra == pytest.approx(24 * rows / weights)


def test_class_tokens_of_another_width_are_in_the_report(vit: Case, done: Result) -> None:
    assert bits_json(done.model, done.plan, 3.0, 16)["first_tokens"] is None
    assert "Class and register" not in report_markdown(report_of(done), done.plan)
    apart = quantize(
        vit.original, vit.samples, choices=[3], bits=3, exchanges=0, metric="recon", prefix_bits=6
    )
    report = report_of(apart)
    assert report["bits"]["first_tokens"] == {"count": 1, "bits": 6}  # type: ignore[index]
    text = report_markdown(report, apart.plan)
    assert "Class and register tokens (1 an image) have 6 bits there" in text


def test_the_uniform_size_is_that_of_the_uniform_checkpoint(vit: Case, done: Result) -> None:
    uniform = packed(done.uniform_model(), done.source, done.uniform, done.config)
    # the plan and the configuration in the header are all that may be missing
    notes = len(json.dumps({"plan": plan_json(done.uniform), "config": done.config.to_json()}))
    assert len(uniform) - notes - 64 < uniform_bytes(done) <= len(uniform)


def test_versions_are_of_what_a_number_depends_on() -> None:
    found = versions()
    assert {"python", "platform", "lampq", "torch", "timm", "scipy", "numpy"} <= set(found)
    assert "unknown" not in found.values()


def test_the_page_states_scores_with_their_interval(done: Result) -> None:
    page = report_markdown(report_of(done), done.plan)
    # from 71.1 to 86.7 %
    assert "| fp32 | 80.00 | ±7.77 | 100 |" in page
    assert "1,000 bytes, 8.0 times smaller" in page


def test_the_page_has_a_row_of_widths_per_block(done: Result) -> None:
    page = report_markdown(report_of(done), done.plan)
    for block in (0, 1):
        names = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
        widths = [str(done.plan[f"blocks.{block}.{name}"].weight) for name in names]
        assert f"| {block} | {' | '.join(widths)} |" in page


def test_the_page_states_profile_and_limits(done: Result) -> None:
    report = report_of(done)
    page = report_markdown(report, done.plan)
    assert page.startswith(f"# {report['model']['name']} at 3 bits\n")
    assert "for speed" not in page
    limits = [{"name": name, "most": 12000, "taken": 11000} for name in ("bytes", "BOPs")]
    config = {**report["config"], "profile": "speed"}
    page = report_markdown({**report, "limits": limits, "config": config}, done.plan)
    assert page.startswith(f"# {report['model']['name']} within 12,000 bytes and 12,000 BOPs\n")
    assert "Counted for the budget: 11,000 of 12,000 BOPs." in page
    assert "Quantized for speed" in page


def test_notices_come_first_on_the_page(done: Result) -> None:
    report = {**report_of(done), "notices": ["the attention is unknown"]}
    lines = report_markdown(report, done.plan).splitlines()
    assert lines[0].startswith("# ")
    assert lines.index("> the attention is unknown") < 4
