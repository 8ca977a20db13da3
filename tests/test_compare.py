from __future__ import annotations

import csv
import json
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from conftest import Case, Outcome, few_bundled
from safetensors.torch import save_file

import lampq.cli
import lampq.inputs
from lampq.compare import PLANS, make_trials
from lampq.config import make_config
from lampq.errors import BudgetError, ConfigError
from lampq.evaluate import interval95, predict, top1
from lampq.methods import METHODS, FitCache, SiteWidths
from lampq.methods.minmax import MinMax
from lampq.metrics import METRICS, Evidence, Sensitivity
from lampq.models import load_model
from lampq.pipeline import quantize
from lampq.progress import Journal
from lampq.report.table import spread, table_csv, table_markdown
from lampq.scoring import PlanScorer, Run
from lampq.sharing import sharing_key
from lampq.types import BitPlan, LayerBits

COMMON = """
images = 16
fit_images = 4
metric_images = 4
score_images = 4
exchanges = 2
patience = 1
choices = [2, 3, 4]
"""
KEYS = {
    *("method", "plan", "bits", "seed", "reconstruct", "top1", "interval95", "images"),
    *("mean_weight_bits", "mean_activation_bits", "file_bytes", "smaller", "seconds"),
    *("seconds_by_stage", "calibration", "notices"),
}
SAME = KEYS - {"seconds", "seconds_by_stage"}
SMALL = ("--methods", "minmax", "--plans", "uniform,recon", "--bits", "3")
Row = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def few_pictures() -> Iterator[None]:
    """The bundled pictures, but only forty of each split."""
    with few_bundled(40):
        yield


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Options that make a trial quick."""
    path = tmp_path_factory.mktemp("options") / "common.toml"
    path.write_text(COMMON)
    return path


def invoke(*arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of lampq compare."""
    found = Outcome("compare", *arguments)
    return found.code, found.out, found.err


def rows_of(out: Path) -> list[Row]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def same(row: Row) -> Row:
    return {key: row[key] for key in SAME}


@pytest.fixture(scope="module")
def fitted() -> list[tuple[str, str, LayerBits]]:
    """Every fit that the comparison below computes."""
    return []


@pytest.fixture(scope="module")
def finished(
    common: Path,
    fitted: list[tuple[str, str, LayerBits]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The folder of two methods at two widths by two plans."""
    out = tmp_path_factory.mktemp("compare") / "run"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("minmax", "repq"):
            factory: Any = METHODS.get(name)

            def fit(
                self: Any,
                layer: Any,
                bits: LayerBits,
                stats: Any,
                fit: Callable[..., Any] = factory.fit,
            ) -> Any:
                fitted.append((self.name, layer.spec.name, bits))
                return fit(self, layer, bits, stats)

            patch.setattr(factory, "fit", fit)
        arguments = ("--methods", "minmax,repq", "--plans", "uniform,lampq", "--bits", "4,3")
        found = invoke(*arguments, "--config", common, "--out", out)
    assert found[0] == 0, found
    (out.parent / "said").write_text(found[1])
    return out


def test_a_row_for_the_float_model_and_one_for_every_trial(finished: Path) -> None:
    table = json.loads((finished / "table.json").read_text())
    assert [(r["method"], r["plan"], r["bits"]) for r in table["rows"]] == [
        ("fp32", None, 32.0),
        *((m, p, b) for m in ("minmax", "repq") for p in ("uniform", "lampq") for b in (4.0, 3.0)),
    ]
    for row in table["rows"]:
        assert set(row) == KEYS
        assert row["images"] == 40
        assert row["interval95"] == pytest.approx(interval95(row["top1"], 40))
        assert row["seconds"] >= sum(row["seconds_by_stage"].values()) > 0
    assert table["seeds"] == []
    assert table["model"]["name"] == "fashion_vit"


def test_no_trial_is_above_its_budget_and_the_uniform_ones_meet_it(finished: Path) -> None:
    for row in rows_of(finished)[1:]:
        assert row["mean_weight_bits"] <= row["bits"]
        assert row["mean_weight_bits"] == row["bits"] or row["plan"] != "uniform"


def test_sizes_are_against_four_bytes_a_parameter(finished: Path) -> None:
    size = 4 * sum(p.numel() for p in load_model("fashion_vit").model.parameters())
    first, *others = rows_of(finished)
    assert (first["file_bytes"], first["smaller"]) == (size, 1.0)
    for row in others:
        assert row["smaller"] == pytest.approx(size / row["file_bytes"])
        assert 3 < row["smaller"] < 32


def test_the_folder_holds_the_tables_and_no_work(finished: Path) -> None:
    names = {"results.jsonl", "table.md", "table.csv", "table.json"}
    assert {path.name for path in finished.iterdir()} == names


def test_the_tables_agree_with_the_rows(finished: Path) -> None:
    rows = json.loads((finished / "table.json").read_text())["rows"]
    with (finished / "table.csv").open(newline="") as handle:
        flat = list(csv.DictReader(handle))
    text = (finished / "table.md").read_text()
    said = (finished.parent / "said").read_text()
    for row, line in zip(rows, flat, strict=True):
        assert (line["method"], line["plan"]) == (row["method"], row["plan"] or "")
        assert float(line["top1"]) == row["top1"]
        assert float(line["seconds_evaluate"]) == row["seconds_by_stage"]["evaluate"]
        name = f"| {row['method']} | {row['plan'] or ''} | {row['bits']:g} |"
        assert re.search(rf"{re.escape(name)}.*\| {row['top1']:.2f} \|", text)
        shown = rf"{row['method']} +{row['plan'] or ''} +{row['bits']:g} +{row['top1']:.2f} "
        assert re.search(shown, said)
    assert "Over seeds" not in text


def test_no_layer_is_fitted_twice_unless_the_target_matters(
    finished: Path, fitted: list[tuple[str, str, LayerBits]]
) -> None:
    plain = [fit for fit in fitted if fit[0] == "minmax"]
    assert len(plain) == len(set(plain))
    # repq is calibrated behind sites at the target: while collecting, and then once more a target
    behind = [fit for fit in fitted if fit[0] == "repq" and fit[1] == "blocks.0.mlp.fc1"]
    counts = {bits: behind.count(fit) for *_, bits in behind for fit in [(*behind[0][:2], bits)]}
    assert counts == {LayerBits(2, 2): 2, LayerBits(3, 3): 3, LayerBits(4, 4): 3}


def test_a_trial_that_shares_gives_what_it_gives_alone(finished: Path) -> None:
    trials = make_trials(tomllib.loads(COMMON), methods=("minmax",), plans=("lampq",), bits=(3,))
    few = lampq.inputs.bundled_samples
    result = quantize(load_model("fashion_vit").model, few("calib"), config=trials[0].config)
    evaluation = few("eval")
    (row,) = (row for row in rows_of(finished) if trials[0].key.items() <= row.items())
    assert row["mean_weight_bits"] == result.plan.mean_weight_bits
    assert row["calibration"] == pytest.approx(asdict(result.calibration["mixed"]))
    assert row["top1"] == top1(predict(result.model, evaluation), evaluation.require_labels(""))


def test_scores_of_a_plan_at_other_edges_are_not_mixed_up(vit: Case) -> None:
    run = Run()
    wide, narrow = SiteWidths(LayerBits(8, 8), 8), SiteWidths(LayerBits(1, 1), 1)
    fits = FitCache(vit.model, vit.graph, MinMax(), vit.stats, wide)
    plan = BitPlan.uniform(vit.graph.allocatable, LayerBits(4, 4))
    reference = predict(vit.model, vit.samples)
    found = [
        PlanScorer(fits.at(sites, run.progress), vit.samples, reference, run).quality(plan)
        for sites in (wide, narrow, wide)
    ]
    assert found[0] == found[2] != found[1]


def test_results_are_not_overwritten_and_a_finished_run_is_not_resumed(
    finished: Path, common: Path
) -> None:
    code, _, err = invoke(*SMALL, "--config", common, "--out", finished)
    assert (code, "already holds a finished run" in err) == (2, True)
    code, _, err = invoke(*SMALL, "--config", common, "--out", finished, "--resume")
    assert (code, "there is nothing to resume" in err) == (2, True)


def test_an_interrupted_comparison_goes_on_where_it_was(
    common: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (*SMALL, "--seeds", "0,1", "--config", common, "--quiet")
    assert invoke(*command, "--out", tmp_path / "whole") == (0, "", "")
    whole = rows_of(tmp_path / "whole")
    out, scored = tmp_path / "run", []
    score = lampq.compare.score

    def interrupted(*arguments: Any) -> Any:
        scored.append(arguments[-1])
        if len(scored) == 4:
            raise KeyboardInterrupt
        return score(*arguments)

    monkeypatch.setattr(lampq.compare, "score", interrupted)
    code, _, err = invoke(*command, "--out", out)
    assert (code, err.count("\n")) == (130, 1)
    assert re.match(r"lampq: interrupted \(the table so far is written\); .*--resume", err)
    assert len(rows_of(out)) == 3
    assert (out / "table.md").read_text().count("| minmax |") == 2
    code, _, err = invoke(*command, "--out", out)
    assert (code, "holds an unfinished run" in err) == (2, True)
    code, _, err = invoke(*command, "--images", "15", "--out", out, "--resume")
    assert (code, "had other options or inputs" in err) == (2, True)
    with (out / "results.jsonl").open("a") as handle:
        handle.write('{"method": "min')
    assert invoke(*command, "--out", out, "--resume") == (0, "", "")
    assert len(scored) == 4 + 2
    assert [same(row) for row in rows_of(out)] == [same(row) for row in whole]
    assert not (out / ".lampq").exists()
    table = json.loads((out / "table.json").read_text())
    assert [(row["plan"], row["seed"]) for row in table["rows"][1:]] == [
        *(("uniform", 0), ("uniform", 1), ("recon", 0), ("recon", 1)),
    ]
    for line in table["seeds"]:
        scores = [row["top1"] for row in whole if row["plan"] == line["plan"]]
        assert line["seeds"] == 2
        assert (line["min"], line["max"]) == (min(scores), max(scores))
        assert line["mean"] == pytest.approx(sum(scores) / 2)
    assert len(table["seeds"]) == 2
    assert "## Over seeds" in (out / "table.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--plans", "uniform,fishr"), "unknown plan 'fishr'; known: uniform, random, vtptq"),
        (("--methods", "minmax,adalgo"), "unknown method 'adalgo'; known: .*adalog"),
        (("--reconstruct", "none,distil"), "unknown .*'distil'; known: .*distill"),
        (("--bits", "4,x"), "bits must be numbers with commas between"),
        (("--bits", "4,1"), "no assignment averages 1 bits"),
        (("--bits", "4,11"), r"bits must be in 1\.\.10, got 11"),
        (("--plans", "uniform,,lampq"), "plans must be names with commas between"),
        (("--plans", "uniform,uniform"), "the same trial is asked for twice"),
        (("--preset", "quick"), "unknown preset 'quick'; known: best, paper"),
    ],
)
def test_a_bad_name_is_one_sentence_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(lampq.inputs, "bundled_samples", lambda _: pytest.fail("pictures are read"))
    code, out, err = invoke(*arguments, "--out", tmp_path / "run")
    assert (code, out) == (2, "")
    assert re.fullmatch(r"lampq: [^\n]+[^\n.]\n", err)
    assert re.search(message, err)
    assert not (tmp_path / "run").exists()


def test_a_model_without_evaluation_pictures_cannot_be_compared(tmp_path: Path) -> None:
    import timm

    save_file(timm.create_model("test_vit").state_dict(), tmp_path / "w.safetensors")
    (tmp_path / "data" / "a").mkdir(parents=True)
    (tmp_path / "data" / "a" / "0.png").write_bytes(b"")
    arguments = ("--weights", tmp_path / "w.safetensors", "--calib", tmp_path / "data")
    code, _, err = invoke("test_vit", *arguments, "--methods", "minmax", "--out", tmp_path / "run")
    assert (code, err) == (2, "lampq: a comparison needs evaluation pictures: give --eval DIR\n")


class Failing:
    """A metric that cannot be measured."""

    def __call__(self, evidence: Evidence, choices: tuple[LayerBits, ...]) -> Sensitivity:
        raise BudgetError("this one fails")


def test_a_failing_trial_is_a_row_and_the_others_go_on(
    common: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METRICS._factories, "hawq", Failing)
    arguments = ("--methods", "minmax", "--bits", "3", "--config", common)
    code, text, _ = invoke(
        *arguments, "--plans", "hawq,uniform", "--out", tmp_path / "some", "--json"
    )
    table = json.loads(text)
    assert (code, [row.get("error") for row in table["rows"]]) == (
        0,
        [None, "this one fails", None],
    )
    assert "hawq 3 seed 0 failed: this one fails" in (tmp_path / "some" / "table.md").read_text()
    code, _, err = invoke(*arguments, "--plans", "hawq", "--out", tmp_path / "all", "--quiet")
    assert code == 2
    assert err == "lampq: every trial failed, the first because this one fails\n"


def test_reconstruction_is_one_more_list(common: Path, tmp_path: Path) -> None:
    options = tmp_path / "common.toml"
    options.write_text(common.read_text() + "iterations = 1\n")
    code, text, err = invoke(
        *("--methods", "minmax", "--plans", "uniform", "--bits", "3", "--json"),
        *("--reconstruct", "none,distill", "--config", options, "--out", tmp_path / "run"),
    )
    assert (code, err) == (0, "")
    rows = json.loads(text)["rows"]
    assert [row["reconstruct"] for row in rows] == [None, None, "distill"]
    assert [row["seconds_by_stage"]["reconstruct"] > 0 for row in rows] == [False, False, True]


def test_plans_change_only_how_widths_are_found() -> None:
    for trial in make_trials({"preset": "paper"}, plans=tuple(PLANS), bits=(3,)):
        config = trial.config
        assert (config.bits, config.target) == (3.0, LayerBits(3, 3))
        assert sharing_key(config) == sharing_key(make_config({"preset": "paper", "bits": 3}))
        if trial.plan == "lampq":
            assert config == make_config({"preset": "paper", "bits": 3})
        elif trial.plan == "uniform+exchanges":
            own = {"metric": "recon", "allocator": "uniform"}
            assert config == make_config({"preset": "paper", "bits": 3, **own})
        elif trial.plan.endswith("+exchanges"):
            metric = trial.plan.removesuffix("+exchanges")
            assert config == make_config({"preset": "paper", "bits": 3, "metric": metric})
        else:
            assert (config.exchanges, config.fallback) == (0, "none")
        assert (config.choices == (3,)) == (trial.plan == "uniform")


def test_the_uniform_plan_has_the_widest_choice_within_the_budget() -> None:
    def only(**options: Any) -> tuple[LayerBits, ...]:
        (trial,) = make_trials(options, plans=("uniform",))
        return trial.config.widths

    assert only(bits=3.5) == (LayerBits(3, 3),)
    assert only(bits=3, choices=[2, 4]) == (LayerBits(2, 2),)
    assert only(bits=4, act_bits=6) == (LayerBits(4, 6),)
    assert only(bits=4, act_bits=3, joint=False) == (LayerBits(4, 3),)


def test_a_file_size_is_no_budget_of_a_comparison() -> None:
    with pytest.raises(ConfigError, match="leave target_size out"):
        make_trials({"target_size": 10**6})


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("fisher", {"images": 3}),
        ("fisher", {"labels": "data"}),
        ("fisher", {"alpha_trace": "quantized", "trace_images": 3}),
        ("output", {"images": 3}),
        ("output", {"labels": "data"}),
        ("hawq", {"images": 3}),
        ("hawq", {"labels": "data"}),
        ("hawq", {"hessian": "hutchinson", "trace_images": 2, "draws": 1}),
        ("kl", {"images": 3}),
        ("loss", {"images": 3}),
        ("nuclear", {"images": 3}),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_measurements_with_other_options_have_other_keys(
    vit: Case, name: str, option: dict[str, Any]
) -> None:
    widths = SiteWidths(LayerBits(8, 8), 4)
    fits = FitCache(vit.model, vit.graph, MinMax(), vit.stats, widths)
    journal = Journal()
    evidence = Evidence(vit.model, vit.graph, fits, vit.samples, journal=journal)
    factory: Any = METRICS.get(name)
    factory(images=2)(evidence, (LayerBits(3, 3), LayerBits(4, 4)))
    before = set(journal._known)
    assert before
    factory(**{"images": 2, **option})(evidence, (LayerBits(3, 3), LayerBits(4, 4)))
    assert set(journal._known) - before


def test_a_comparison_without_seeds_has_no_spread() -> None:
    row = {"method": "a", "plan": "b", "bits": 3.0, "seed": 0, "reconstruct": None}
    failed = {**row, "seed": 1, "error": "no, it did not", "seconds": 1.0}
    assert spread([{**row, "top1": 50.0}, failed]) == []
    text = table_markdown({"model": {"name": "m"}, "preset": "best", "rows": [failed], "seeds": []})
    assert "| a | b | 3 |  | 1 | failed |" in text
    assert table_csv([failed]).splitlines()[1].endswith(',"no, it did not"')
