from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from conftest import Case
from torch import Tensor, nn

import lampq
import lampq.pipeline
from lampq import quantize
from lampq.artifact.fits import FitFolder
from lampq.config import RunConfig, make_config
from lampq.errors import BudgetError, ConfigError, DataError, FormatError, GraphError
from lampq.evaluate import divergence, predict
from lampq.graph.families import RolePattern
from lampq.methods import METHODS
from lampq.metrics import METRICS, Evidence, Sensitivity
from lampq.pipeline import Result, packed
from lampq.prepare import build, site_widths
from lampq.progress import Journal, Progress
from lampq.quant.half import is_half
from lampq.quant.modules import QuantLayer, QuantMatMul
from lampq.scoring import PlanScorer, Run, cumulative_errors
from lampq.types import BitPlan, CostTable, LayerBits, LayerRole

T = TypeVar("T")
QUICK: dict[str, Any] = {
    "method": "minmax",
    "choices": [2, 3, 4],
    "bits": 3,
    "exchanges": 6,
    "patience": 2,
}
quiet = pytest.mark.filterwarnings("ignore::UserWarning")


@torch.no_grad()
def logits_of(result: Result, case: Case) -> Tensor:
    return result.model(case.samples.images)


@pytest.fixture(scope="module")
def done(vit: Case) -> Result:
    """A quick run on the tiny ViT."""
    return quantize(vit.original, vit.samples, **QUICK)


def test_the_float_model_is_left_as_it_was(case: Case) -> None:
    model = copy.deepcopy(case.original)
    model.train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    modules = {name: type(module) for name, module in model.named_modules()}
    quantize(model, case.samples, **QUICK)
    assert {name: type(module) for name, module in model.named_modules()} == modules
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@quiet
@pytest.mark.parametrize("preset", ["best", "paper"])
def test_the_same_seed_gives_the_same_plan_and_weights(vit: Case, preset: str) -> None:
    options = {**QUICK, "preset": preset, "seed": 3, "metric_images": 4, "score_images": 4}
    first = quantize(vit.original, vit.samples, **options)
    torch.rand(5)
    second = quantize(vit.original, vit.samples, **options)
    assert first.plan == second.plan
    assert first.steps == second.steps
    states = first.model.state_dict(), second.model.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.parametrize("bits", [2, 2.5, 3.3, 4])
def test_the_plan_fits_the_budget(case: Case, bits: float) -> None:
    result = quantize(case.original, case.samples, **{**QUICK, "bits": bits})
    weights = sum(layer.n_params for layer in result.plan.layers)
    used = sum(layer.n_params * result.plan[layer.name].weight for layer in result.plan.layers)
    assert used <= bits * weights * (1 + 1e-9)
    assert {width.weight for width in result.plan.widths} <= {2, 3, 4}


def test_the_model_has_the_widths_of_the_plan(done: Result) -> None:
    for name, bits in done.plan.items():
        layer = done.model.get_submodule(name)
        assert layer.bits == bits
        assert layer.weight_quantizer.bits == bits.weight
        assert layer.input_quantizer.bits == bits.activation
        assert int(layer.codes.max()) < 2**bits.weight


def test_the_result_is_not_worse_than_uniform_on_the_calibration_images(done: Result) -> None:
    assert done.calibration["mixed"].agreement >= done.calibration["uniform"].agreement
    assert done.calibration["fp32"].agreement == pytest.approx(0, abs=1e-9)


def test_without_contrast_all_blocks_cost_the_same(vit: Case, done: Result) -> None:
    assert done.sensitivity is not None
    even = quantize(vit.original, vit.samples, **QUICK, block_contrast=0.0).sensitivity
    assert even is not None
    blocks = [layer.block for layer in even.table.layers]
    assert len(set(blocks)) > 1

    def means(table: CostTable) -> list[float]:
        logs = np.log(table.cost).mean(axis=1)
        return [float(logs[np.equal(blocks, b)].mean()) for b in sorted(set(blocks))]

    assert means(even.table) == pytest.approx([np.mean(means(even.table))] * len(set(blocks)))
    assert np.ptp(means(done.sensitivity.table)) > 0.01


def test_the_scores_of_the_result_are_those_of_its_model(vit: Case, done: Result) -> None:
    reference = predict(vit.model, vit.samples)
    for name, model in (("mixed", done.model), ("uniform", done.uniform_model())):
        measured = -divergence(predict(model, vit.samples), reference)
        assert done.calibration[name].agreement == pytest.approx(measured, rel=1e-4, abs=1e-9)


def test_accepted_steps_lead_to_the_plan(done: Result) -> None:
    assert done.allocation is not None
    plan = done.allocation.plan
    for step in done.steps:
        plan = step.plan if step.accepted else plan
    assert plan == done.plan


def test_no_more_exchanges_than_asked_for_are_tried(vit: Case) -> None:
    options = {**QUICK, "exchanges": 2, "patience": 50}
    assert len(quantize(vit.original, vit.samples, **options).steps) == 2
    assert quantize(vit.original, vit.samples, **{**QUICK, "exchanges": 0}).steps == ()


def test_a_given_plan_is_honoured(case: Case) -> None:
    names = [layer.name for layer in case.graph.allocatable]
    wanted = {name: LayerBits(2 + i % 5, 3 + i % 4) for i, name in enumerate(names)}
    result = quantize(case.original, case.samples, plan=wanted, method="minmax", bits=8)
    assert dict(result.plan) == wanted
    assert (result.allocation, result.sensitivity, result.steps) == (None, None, ())
    for name, bits in wanted.items():
        assert result.model.get_submodule(name).bits == bits


def test_a_given_plan_of_an_earlier_run_gives_the_same_model(vit: Case, done: Result) -> None:
    again = quantize(vit.original, vit.samples, plan=dict(done.plan), **QUICK)
    assert torch.equal(logits_of(again, vit), logits_of(done, vit))


def test_a_given_plan_over_the_target_is_noticed(vit: Case) -> None:
    plan = {layer.name: LayerBits(4, 4) for layer in vit.graph.allocatable}
    result = quantize(vit.original, vit.samples, plan=plan, method="minmax", bits=3)
    assert any("averages 4.0000 bits, the budget allows 3.0000" in n for n in result.notices)


def test_a_given_plan_without_a_layer_is_refused(vit: Case) -> None:
    plan = {layer.name: LayerBits(4, 4) for layer in vit.graph.allocatable[1:]}
    with pytest.raises(ConfigError, match=r"the plan has no width for 'blocks\.0\.attn\.qkv'"):
        quantize(vit.original, vit.samples, plan=plan, method="minmax")


def test_a_given_plan_with_a_strange_layer_is_refused(vit: Case) -> None:
    plan = {layer.name: LayerBits(4, 4) for layer in vit.graph.allocatable}
    with pytest.raises(ConfigError, match="the plan names 'head', which is no searched layer"):
        quantize(vit.original, vit.samples, plan={**plan, "head": LayerBits(4, 4)}, method="minmax")


SIZED = {
    "minmax": {"method": "minmax", "choices": [2, 3, 4, 5, 6, 7, 8]},
    "one-bit": {"method": "minmax", "choices": [1, 2, 3, 4]},
    "repq": {"method": "repq", "choices": [2, 3, 4, 5, 6, 7, 8]},
    "adalog": {"method": "adalog", "choices": [2, 4]},
}


def _bytes(result: Result) -> int:
    return len(packed(result.model, result.source, result.plan, result.config))


@quiet
@pytest.mark.parametrize("options", SIZED.values(), ids=SIZED)
@pytest.mark.parametrize("share", [0.02, 0.5, 0.98])
def test_the_file_is_not_larger_than_the_target_size(
    vit: Case, tmp_path: Path, options: dict[str, Any], share: float
) -> None:
    names = [layer.name for layer in vit.graph.allocatable]
    smallest, largest = (
        _bytes(
            quantize(
                vit.original,
                vit.samples,
                plan=dict.fromkeys(names, LayerBits(width, width)),
                **options,
            )
        )
        for width in (options["choices"][0], options["choices"][-1])
    )
    target = int(smallest + 600 + share * (largest - smallest))
    result = quantize(vit.original, vit.samples, target_size=target, exchanges=2, **options)
    path = tmp_path / "model.safetensors"
    result.save(path)
    assert path.stat().st_size <= target
    assert target - path.stat().st_size < 0.25 * (largest - smallest) + 1200


def test_a_target_size_that_is_too_small_states_one_that_is_not(vit: Case, tmp_path: Path) -> None:
    options = {"method": "minmax", "choices": [2, 3], "exchanges": 0}
    with pytest.raises(BudgetError, match="no assignment takes 5000 bytes or less") as caught:
        quantize(vit.original, vit.samples, target_size=5000, **options)
    (least,) = map(int, re.findall(r"choices take (\d+)$", str(caught.value)))
    result = quantize(vit.original, vit.samples, target_size=least, **options)
    result.save(tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").stat().st_size <= least


class Inverted:
    """A metric that takes the most harmful widths for the least harmful ones."""

    def __call__(self, evidence: Evidence, choices: tuple[LayerBits, ...]) -> Sensitivity:
        found = METRICS.get("recon")()(evidence, choices)
        table = found.table
        return Sensitivity(CostTable(table.layers, table.choices, -table.cost), {})


def test_a_mixed_plan_that_is_worse_is_replaced_by_uniform_with_a_warning(
    vit: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METRICS._factories, "output", Inverted)
    with pytest.warns(UserWarning, match="the uniform plan is returned"):
        result = quantize(vit.original, vit.samples, **{**QUICK, "exchanges": 0})
    assert set(result.plan.widths) == {LayerBits(3, 3)}
    assert result.allocation is not None
    assert set(result.allocation.plan.widths) == {LayerBits(2, 2)}
    assert any("the uniform plan is returned" in notice for notice in result.notices)


def test_without_a_fallback_a_worse_plan_is_kept(
    vit: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METRICS._factories, "output", Inverted)
    options = {**QUICK, "exchanges": 0, "fallback": "none"}
    result = quantize(vit.original, vit.samples, **options)
    assert set(result.plan.widths) == {LayerBits(2, 2)}
    assert result.notices == ()


def test_the_plan_that_replaces_a_worse_one_is_made_of_the_choices(
    vit: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METRICS._factories, "output", Inverted)
    options = {"method": "minmax", "choices": [2, 3], "bits": 4, "exchanges": 0}
    with pytest.warns(UserWarning, match="the uniform plan is returned"):
        result = quantize(vit.original, vit.samples, **options)
    assert {width.weight for width in result.plan.widths} <= {2, 3}


@quiet
@pytest.mark.parametrize("start", ["better", "allocated"])
def test_exchanges_start_from_the_better_plan_or_the_allocated_one(
    vit: Case, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    monkeypatch.setitem(METRICS._factories, "output", Inverted)
    options = {**QUICK, "exchanges": 1, "start": start}
    result = quantize(vit.original, vit.samples, **options)
    assert result.allocation is not None
    first = result.uniform if start == "better" else result.allocation.plan
    assert result.allocation.plan != result.uniform
    assert all(
        sum(first[name] != bits for name, bits in step.plan.items())
        == len(step.widened) + len(step.narrowed)
        for step in result.steps
    )
    assert result.steps


class Interrupting(Progress):
    """Progress that is interrupted at one of its events."""

    def __init__(self, at: int | None = None) -> None:
        super().__init__()
        self.at, self.events = at, 0

    def event(self) -> None:
        if self.events == self.at:
            raise KeyboardInterrupt
        self.events += 1

    def track(self, items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
        for item in items:
            self.event()
            yield item

    def on_plan(self, _plan: BitPlan, _model: nn.Module) -> None:
        self.event()


def _run(case: Case, options: dict[str, Any], folder: Path, at: int | None) -> tuple[Result, int]:
    progress = Interrupting(at)
    run = Run(progress, Journal(folder / "j.jsonl"), FitFolder(folder / "fits"), progress.on_plan)
    return quantize(case.original, case.samples, run=run, **options), progress.events


RESUMED: dict[str, tuple[str, dict[str, Any]]] = {
    "best": ("vit", QUICK),
    "paper": ("vit", {**QUICK, "preset": "paper", "patience": 3, "ratios": "paper"}),
    "exchange": ("vit", {**QUICK, "exchange_error": "local"}),
    "swin": ("swin", {**QUICK, "method": "repq"}),
}


@quiet
@pytest.mark.slow
@pytest.mark.parametrize(("model", "options"), RESUMED.values(), ids=RESUMED)
def test_an_interrupted_run_that_is_resumed_ends_like_one_that_was_not(
    request: pytest.FixtureRequest, tmp_path: Path, model: str, options: dict[str, Any]
) -> None:
    case: Case = request.getfixturevalue(model)
    (tmp_path / "whole").mkdir()
    whole, events = _run(case, options, tmp_path / "whole", None)
    assert events > 20
    expected = packed(whole.model, whole.source, whole.plan, whole.config)
    for share in (0, 0.3, 0.7, 1):
        at = round(share * (events - 1))
        folder = tmp_path / str(at)
        folder.mkdir()
        with pytest.raises(KeyboardInterrupt):
            _run(case, options, folder, at)
        resumed, left = _run(case, options, folder, None)
        assert resumed.plan == whole.plan
        assert resumed.steps == whole.steps
        assert resumed.calibration == whole.calibration
        assert torch.equal(logits_of(resumed, case), logits_of(whole, case))
        assert packed(resumed.model, resumed.source, resumed.plan, resumed.config) == expected
        assert left <= events


def test_a_resumed_run_does_not_score_again(
    vit: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = _run(vit, QUICK, tmp_path, None)
    monkeypatch.setattr(PlanScorer, "_measure", lambda *_: pytest.fail("scored again"))
    second, _ = _run(vit, QUICK, tmp_path, None)
    assert second.plan == first.plan


def test_the_best_plan_so_far_is_handed_out_as_it_is_found(vit: Case) -> None:
    seen: list[BitPlan] = []
    result = quantize(
        vit.original, vit.samples, run=Run(on_plan=lambda plan, _: seen.append(plan)), **QUICK
    )
    assert result.allocation is not None
    accepted = [step.plan for step in result.steps if step.accepted]
    assert seen == [result.allocation.plan, *accepted, result.plan]


@quiet
@pytest.mark.parametrize("preset", ["best", "paper"])
def test_samples_without_labels_do(vit: Case, preset: str) -> None:
    samples = replace(vit.samples, labels=None)
    result = quantize(vit.original, samples, **{**QUICK, "preset": preset})
    assert result.budget.allows(result.plan)


def test_batches_of_images_and_labels_do(vit: Case, done: Result) -> None:
    result = quantize(vit.original, list(vit.samples.batches(4)), **QUICK)
    assert result.plan == done.plan


@pytest.mark.parametrize("metric", list(METRICS))
@quiet
def test_every_metric_leads_to_a_plan(case: Case, metric: str) -> None:
    result = quantize(case.original, case.samples, **{**QUICK, "metric": metric, "exchanges": 2})
    assert result.budget.allows(result.plan)
    assert result.sensitivity is not None
    assert result.sensitivity.table.layers == result.plan.layers


@quiet
@pytest.mark.parametrize("error", ["cost", "local", "cumulative"])
@pytest.mark.parametrize("ratios", ["paper", "exact", "optimal", "measured"])
def test_every_kind_of_exchange_error_keeps_the_budget(vit: Case, error: str, ratios: str) -> None:
    options = {**QUICK, "exchange_error": error, "ratios": ratios}
    result = quantize(vit.original, vit.samples, **options)
    assert result.steps
    assert all(result.budget.allows(step.plan) for step in result.steps)


def test_cumulative_errors_compare_the_quantized_with_the_float_model(
    vit: Case, done: Result
) -> None:
    found = cumulative_errors(done.fits, done.plan, vit.samples)
    quantized = done.fits.assembled(done.plan)
    outputs: dict[str, Tensor] = {}
    for model in (done.fits.model, quantized):
        for name in ("blocks.0.attn.qkv", "blocks.1.mlp.fc2"):
            key = f"{name} {model is quantized}"
            model.get_submodule(name).register_forward_hook(
                lambda _m, _a, y, key=key: outputs.__setitem__(key, y)
            )
        with torch.no_grad():
            model(vit.samples.images)
    for module in done.fits.model.modules():
        module._forward_hooks.clear()
    for name in ("blocks.0.attn.qkv", "blocks.1.mlp.fc2"):
        exact, rough = outputs[f"{name} False"], outputs[f"{name} True"]
        power = (exact - done.fits.model.get_submodule(name).bias).square().sum()
        expected = float((rough - exact).square().sum() / power)
        assert found[name] == pytest.approx(expected, rel=1e-4)


def test_activation_bits_keep_their_distance_from_the_weight_bits(vit: Case) -> None:
    result = quantize(vit.original, vit.samples, **{**QUICK, "act_bits": 5})
    assert all(bits.activation == bits.weight + 2 for bits in result.plan.widths)


@pytest.mark.parametrize(
    ("edge", "matmul", "expected"),
    [(8, "target", (8, 3)), ("target", "follow", (3, None)), (6, 7, (6, 7))],
    ids=["default", "target-follow", "numbers"],
)
def test_sites_outside_the_plan_get_the_configured_widths(
    edge: int | str, matmul: int | str, expected: tuple[int, int | None]
) -> None:
    found = site_widths(make_config({"bits": 3.5, "edge_bits": edge, "matmul_bits": matmul}))
    assert (found.edge.weight, found.matmul) == expected


def test_edges_are_quantized_at_the_configured_width(vit: Case) -> None:
    result = quantize(vit.original, vit.samples, **{**QUICK, "edge_bits": 5, "matmul_bits": 6})
    assert result.model.get_submodule("head").bits == LayerBits(5, 5)
    assert result.model.get_submodule("blocks.0.attn.qk").left.bits == 6


@pytest.mark.parametrize(
    ("method", "gradients", "block_images"),
    [("minmax", False, 0), ("gptq", False, 0), ("ptq4vit", True, 0), ("apq", True, 4)],
)
def test_a_method_is_given_the_statistics_it_asks_for(
    vit: Case,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    gradients: bool,
    block_images: int,
) -> None:
    asked: list[tuple[bool, int]] = []

    def collect(*arguments: Any, **options: Any) -> Any:
        asked.append((options["gradients"], options["block_images"]))
        return vit.stats

    monkeypatch.setattr(lampq.pipeline, "collect", collect)
    plan = {layer.name: LayerBits(4, 4) for layer in vit.graph.allocatable}
    quantize(vit.original, vit.samples, plan=plan, method=method)
    assert asked == [(gradients, block_images)]


def test_the_options_of_the_configuration_reach_method_and_metric() -> None:
    config = make_config(
        {
            "zero_code": "reserved",
            "onebit": "adalog",
            "search": "exhaustive",
            "input_ranges": "token",
            "prefix_bits": 6,
        }
    )
    method: Any = build(METHODS.get("adalog"), config)
    assert (method.input_ranges, method.prefix_bits) == ("token", 6)
    assert (method.zero_code, method.onebit) == ("reserved", "adalog")
    assert method.search == "exhaustive"
    metric: Any = build(
        METRICS.get("fisher"),
        make_config({"metric": "fisher", "gamma": 7, "beta": 3, "mu": 0.25, "labels": "data"}),
    )
    assert (metric.penalty, metric.probe_bits, metric.probe_blocks) == (7.0, 3, 0.25)
    assert metric.labels == "data"


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "method": ({"method": "adalgo"}, ConfigError, "unknown method 'adalgo'; known: .*adalog"),
    "metric": ({"metric": "outputs"}, ConfigError, "unknown metric 'outputs'; known: .*output"),
    "allocator": ({"allocator": "lp"}, ConfigError, "unknown allocator 'lp'; known: .*ilp"),
    "ranges": (
        {"method": "repq", "input_ranges": "token"},
        ConfigError,
        "method 'repq' has static ranges only: set input_ranges to static, got 'token'",
    ),
    "prefix": (
        {"method": "repq", "prefix_bits": 8},
        ConfigError,
        "method 'repq' has one width for all tokens: set prefix_bits to target, got 8",
    ),
    "preset": ({"preset": "quick"}, ConfigError, "unknown preset 'quick'"),
    "option": ({"bitz": 3}, ConfigError, "unknown option 'bitz'"),
    "budget": ({"bits": 1.5, "choices": [2, 3]}, BudgetError, r"averages 1\.5 bits: the narrow"),
    "both": ({"config": RunConfig(), "bits": 3}, ConfigError, "either config or single options"),
}


@pytest.mark.parametrize(("options", "kind", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_option_is_refused_before_the_first_forward_pass(
    vit: Case, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    model = copy.deepcopy(vit.original)
    passes: list[int] = []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    with pytest.raises(kind, match=message):
        quantize(model, vit.samples, **options)
    assert not passes


def test_weights_that_are_not_finite_are_refused(vit: Case) -> None:
    model = copy.deepcopy(vit.original)
    with torch.no_grad():
        model.blocks[0].attn.proj.weight[3, 3] = float("nan")
    with pytest.raises(FormatError, match=r"'blocks\.0\.attn\.proj\.weight' contains NaN"):
        quantize(model, vit.samples, **QUICK)


def test_a_model_without_known_layers_is_refused(vit: Case) -> None:
    with pytest.raises(GraphError, match="no layer matches the role patterns"):
        quantize(nn.Sequential(nn.Linear(2, 2)), vit.samples)


def test_no_samples_at_all_are_refused(vit: Case) -> None:
    with pytest.raises(DataError, match="there are no samples"):
        quantize(vit.original, [])


def test_data_labels_that_are_missing_are_refused(vit: Case) -> None:
    samples = replace(vit.samples, labels=None)
    with pytest.raises(DataError, match="needs labels"):
        quantize(vit.original, samples, labels="data", **QUICK)


class Plain(nn.Module):
    """Two layers outside of any block."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(48, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x.flatten(1)).relu())


@quiet
@pytest.mark.parametrize("metric", list(METRICS))
def test_layers_outside_of_blocks_are_quantized_by_every_metric(metric: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Plain()
    images = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    patterns = (RolePattern("fc1", LayerRole.FC1), RolePattern("fc2", LayerRole.FC2))
    result = quantize(model, [images], patterns=patterns, metric=metric, **QUICK)
    assert set(result.plan) == {"fc1", "fc2"}
    assert result.budget.allows(result.plan)


def test_attention_lampq_does_not_know_is_warned_of() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Plain()
    images = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    patterns = (RolePattern("fc1", LayerRole.FC1), RolePattern("fc2", LayerRole.FC2))
    with (
        pytest.warns(UserWarning, match="matmuls stay in float"),
        pytest.warns(UserWarning, match="no layer plays the role qkv, proj"),
    ):
        result = quantize(model, [images], patterns=patterns, **QUICK)
    assert len(result.notices) == 2


@quiet
@pytest.mark.parametrize("method", ["adalog", "repq"])
def test_for_speed_products_stay_in_float_and_a_plan_can_be_refitted(
    case: Case, method: str
) -> None:
    options = {**QUICK, "method": method, "exchanges": 0}
    first = quantize(case.original, case.samples, **options)
    again = quantize(case.original, case.samples, plan=dict(first.plan), profile="speed", **options)
    assert again.plan == first.plan
    assert again.notices == ()
    modules = list(again.model.modules())
    assert any(isinstance(m, QuantMatMul) for m in first.model.modules())
    assert not any(isinstance(m, QuantMatMul) for m in modules)
    inputs = [m.input_quantizer for m in modules if isinstance(m, QuantLayer)]
    assert {"uniform"} == {q.kind for q in inputs if q is not None}


@pytest.mark.parametrize("rest_bits", [16, 32])
def test_the_model_of_a_result_is_that_of_its_file(vit: Case, rest_bits: int) -> None:
    result = quantize(vit.original, vit.samples, rest_bits=rest_bits, **QUICK)
    assert is_half(result.model.get_submodule("norm").weight) == (rest_bits == 16)
    assert is_half(result.uniform_model().get_submodule("norm").weight) == (rest_bits == 16)


def test_a_saved_result_is_loaded_with_equal_logits(case: Case, tmp_path: Path) -> None:
    result = quantize(case.original, case.samples, **QUICK)
    result.save(tmp_path / "model.safetensors")
    loaded = lampq.load(tmp_path / "model.safetensors", case.original)
    with torch.no_grad():
        assert torch.equal(loaded(case.samples.images), logits_of(result, case))


def test_the_seconds_of_every_stage_are_measured(vit: Case) -> None:
    progress = Progress()
    quantize(vit.original, vit.samples, run=Run(progress), **QUICK)
    assert {"collect", "fit", "metric", "allocate", "refine"} <= set(progress.seconds)
    assert all(seconds >= 0 for seconds in progress.seconds.values())


def test_the_cost_table_of_the_result_is_finite(done: Result) -> None:
    assert done.sensitivity is not None
    assert np.isfinite(done.sensitivity.table.cost).all()
    assert done.sensitivity.table.choices == done.config.widths
