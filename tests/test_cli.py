from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import timm
import torch
from conftest import Outcome, few_bundled, write_pictures
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import lampq
import lampq.cli
import lampq.inputs
import lampq.typed
from lampq.artifact.checkpoint import digest
from lampq.cli import TerminalProgress
from lampq.config import RunConfig
from lampq.data import Samples
from lampq.evaluate import predict, top1
from lampq.models import bundled_samples, load_model

T = TypeVar("T")
QUICK = [
    *("--method", "minmax", "--choices", "2,3,4", "--bits", "3"),
    *("--images", "64", "--fit-images", "8", "--metric-images", "8", "--score-images", "8"),
    *("--exchanges", "3", "--patience", "1"),
]
STAGES = {"collect", "fit", "metric", "allocate", "refine", "reconstruct", "evaluate"}


@pytest.fixture(scope="module", autouse=True)
def few_pictures() -> Iterator[None]:
    """The bundled pictures, but only 120 of each split."""
    with few_bundled(120):
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run on the bundled model."""
    out = tmp_path_factory.mktemp("cli") / "run"
    found = Outcome("quantize", "--out", out, "--quiet", *QUICK)
    assert (found.code, found.out, found.err) == (0, "", "")
    return out


@pytest.fixture(scope="module")
def report(finished: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((finished / "report.json").read_text())
    return content


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder of thirty bundled pictures, with labels.csv and images/."""
    return write_pictures(tmp_path_factory.mktemp("pictures"), bundled_samples("eval"), 30)


def test_a_run_writes_its_files_and_nothing_else(finished: Path) -> None:
    assert {path.name for path in finished.iterdir()} == {
        "histograms.json",
        "model.safetensors",
        "plan.json",
        "report.html",
        "report.json",
        "report.md",
        "sensitivity.json",
    }


def test_the_report_has_the_documented_keys(report: dict[str, Any]) -> None:
    kinds = {
        "scores": dict,
        "bits": dict,
        "solver": dict,
        "seconds": dict,
        "files": dict,
        "exchanges": list,
        "config": dict,
        "versions": dict,
        "seed": int,
        "plan": dict,
        "model": dict,
        "notices": list,
        "calibration": dict,
        "float_bytes": int,
        "uniform_bytes": int,
    }
    assert {key: type(report.get(key)) for key in kinds} == kinds


def test_the_report_scores_three_models(report: dict[str, Any]) -> None:
    assert set(report["scores"]) == {"fp32", "uniform", "mixed"}
    for score in report["scores"].values():
        assert score["images"] == 120
        assert 0 <= score["top1"] <= 100


def test_the_float_score_of_the_report_is_that_of_the_float_model(report: dict[str, Any]) -> None:
    samples = lampq.inputs.bundled_samples("eval")
    expected = top1(predict(load_model("fashion_vit").model, samples), samples.labels)
    assert report["scores"]["fp32"]["top1"] == pytest.approx(expected, abs=1e-9)


def test_the_report_states_seconds_of_every_stage(report: dict[str, Any]) -> None:
    assert set(report["seconds"]) == STAGES
    assert all(type(value) is float and value >= 0 for value in report["seconds"].values())
    assert report["seconds"]["evaluate"] > 0
    assert report["seconds"]["fit"] > 0


def test_the_report_says_what_the_solver_said(report: dict[str, Any]) -> None:
    assert report["solver"]["status"] == "optimal"
    assert report["solver"]["proven_optimal"] is True
    assert type(report["solver"]["objective"]) is float


def test_the_report_holds_the_effective_configuration(report: dict[str, Any]) -> None:
    assert set(report["config"]) == set(RunConfig.__slots__)
    assert report["config"]["method"] == "minmax"
    assert report["config"]["choices"] == [2, 3, 4]
    assert report["config"]["images"] == 64
    assert report["seed"] == report["config"]["seed"] == 0


def test_the_report_names_the_versions_it_depends_on(report: dict[str, Any]) -> None:
    assert {"lampq", "torch", "timm", "numpy", "scipy", "python"} <= set(report["versions"])
    assert report["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert report["versions"]["lampq"] == lampq.__version__


def test_the_report_states_the_true_size_of_the_file(
    report: dict[str, Any], finished: Path
) -> None:
    size = (finished / "model.safetensors").stat().st_size
    assert report["files"] == {"model.safetensors": size}
    parameters = sum(p.numel() for p in load_model("fashion_vit").model.parameters())
    assert report["float_bytes"] == 4 * parameters


def test_the_mean_width_of_the_report_is_that_of_the_plan_and_within_the_budget(
    report: dict[str, Any],
) -> None:
    model = load_model("fashion_vit").model
    weights = {n: model.get_submodule(n).weight.numel() for n in report["plan"]["layers"]}
    used = sum(weights[n] * b["weight"] for n, b in report["plan"]["layers"].items())
    mean = used / sum(weights.values())
    assert mean <= 3.0
    assert report["plan"]["mean_weight_bits"] == pytest.approx(mean)
    assert report["bits"]["mean_weight_searched"] == pytest.approx(mean)
    assert report["bits"]["target"] == 3.0


def test_the_report_lists_every_attempted_exchange(report: dict[str, Any]) -> None:
    assert 0 < len(report["exchanges"]) <= 3
    layers = set(report["plan"]["layers"])
    for exchange in report["exchanges"]:
        assert exchange["widened"]
        assert set(exchange["widened"]) | set(exchange["narrowed"]) <= layers
        assert type(exchange["score"]) is float
        assert type(exchange["accepted"]) is bool
        assert exchange["mean_weight_bits"] <= 3.0


def test_the_plan_file_is_the_plan_of_the_report(report: dict[str, Any], finished: Path) -> None:
    assert json.loads((finished / "plan.json").read_text()) == report["plan"]


def test_the_sensitivity_file_has_a_row_of_costs_per_layer(
    report: dict[str, Any], finished: Path
) -> None:
    content = json.loads((finished / "sensitivity.json").read_text())
    assert content["choices"] == [[2, 2], [3, 3], [4, 4]]
    assert set(content["cost"]) == set(report["plan"]["layers"])
    assert all(len(row) == 3 for row in content["cost"].values())


def test_the_page_for_people_names_the_scores(report: dict[str, Any], finished: Path) -> None:
    text = (finished / "report.md").read_text()
    for name, score in report["scores"].items():
        assert re.search(rf"\| {name} \| {score['top1']:.2f} \|", text)


def test_the_json_of_quantize_is_the_report(tmp_path: Path) -> None:
    found = Outcome("quantize", "--out", tmp_path / "run", "--json", *QUICK)
    assert (found.code, found.err) == (0, "")
    assert json.loads(found.out) == json.loads((tmp_path / "run" / "report.json").read_text())


def test_eval_prints_one_json_object_that_agrees_with_the_report(
    report: dict[str, Any], finished: Path
) -> None:
    found = Outcome("eval", finished / "model.safetensors", "--json")
    assert (found.code, found.err) == (0, "")
    content = json.loads(found.out)
    assert content["top1"] == pytest.approx(report["scores"]["mixed"]["top1"], abs=1e-9)
    assert content["images"] == 120


def test_eval_for_people_states_accuracy_and_number(report: dict[str, Any], finished: Path) -> None:
    found = Outcome("eval", finished / "model.safetensors")
    assert found.code == 0
    assert f"top-1 {report['scores']['mixed']['top1']:.2f} %" in found.out
    assert "on 120 images" in found.out


def test_eval_scores_a_folder_of_pictures(finished: Path, pictures: Path) -> None:
    found = Outcome("eval", finished / "model.safetensors", "--data", pictures, "--json")
    samples = bundled_samples("eval")
    samples = Samples(
        samples.images[:30], samples.require_labels("")[:30], samples.mean, samples.std
    )
    expected = top1(predict(lampq.load(finished / "model.safetensors"), samples), samples.labels)
    content = json.loads(found.out)
    assert (content["top1"], content["images"]) == (pytest.approx(expected), 30)


def test_eval_of_fewer_pictures_scores_that_many(finished: Path, pictures: Path) -> None:
    arguments = ("eval", finished / "model.safetensors", "--json", "--images", 7)
    assert json.loads(Outcome(*arguments).out)["images"] == 7
    assert json.loads(Outcome(*arguments, "--data", pictures).out)["images"] == 7


def test_show_prints_the_width_of_every_block(report: dict[str, Any], finished: Path) -> None:
    found = Outcome("show", finished / "model.safetensors")
    assert (found.code, found.err) == (0, "")
    assert "fashion_vit" in found.out
    assert f"{report['plan']['mean_weight_bits']:.4f}" in found.out
    rows = re.findall(r"│ +(\d) │ +(\d) │ +(\d) │ +(\d) │ +(\d) │", found.out)
    assert len(rows) == 6
    for block, *widths in rows:
        layers = [f"blocks.{block}.{n}" for n in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]
        assert widths == [str(report["plan"]["layers"][name]["weight"]) for name in layers]


def test_show_as_json_prints_the_header(finished: Path) -> None:
    found = Outcome("show", finished / "model.safetensors", "--json")
    content = json.loads(found.out)
    assert content["source"]["name"] == "fashion_vit"
    assert content["format_version"] == 2


def test_a_plan_given_back_gives_the_same_model(finished: Path, tmp_path: Path) -> None:
    plan = finished / "plan.json"
    found = Outcome("quantize", "--out", tmp_path / "run", "--plan", plan, "--quiet", *QUICK)
    assert (found.code, found.err) == (0, "")
    first, second = (load_file(f / "model.safetensors") for f in (finished, tmp_path / "run"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["solver"] == {"status": "plan given", "proven_optimal": False, "objective": None}


def test_a_run_of_the_same_seed_writes_the_same_model(finished: Path, tmp_path: Path) -> None:
    Outcome("quantize", "--out", tmp_path / "run", "--quiet", *QUICK)
    first, second = ((f / "model.safetensors").read_bytes() for f in (finished, tmp_path / "run"))
    assert first == second


def test_options_of_a_file_are_used_and_flags_override_them(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('method = "minmax"\nbits = 4\nchoices = [2, 3]\nimages = 16\nexchanges = 0\n')
    found = Outcome(
        "quantize",
        "--out",
        tmp_path / "run",
        "--config",
        path,
        "--bits",
        3,
        "--fit-images",
        4,
        "--metric-images",
        4,
        "--score-images",
        4,
        "--json",
    )
    config = json.loads(found.out)["config"]
    assert (config["bits"], config["choices"], config["images"]) == (3.0, [2, 3], 16)


def test_separate_widths_are_written_shown_and_used_again(tmp_path: Path) -> None:
    command = (*QUICK, "--no-joint", "--act-choices", "2,4", "--json")
    found = Outcome("quantize", "--out", tmp_path / "run", *command)
    assert (found.code, found.err) == (0, "")
    report = json.loads(found.out)
    assert (report["config"]["joint"], report["config"]["act_choices"]) == (False, [2, 4])
    widths = [b["activation"] for b in report["plan"]["layers"].values()]
    assert set(widths) == {2, 4}
    assert report["plan"]["mean_activation_bits"] == sum(widths) / len(widths) <= 3.0
    shown = Outcome("show", tmp_path / "run" / "model.safetensors").out
    assert f"mean activation bits {sum(widths) / len(widths):.4f}" in shown
    (name, bits), *_ = report["plan"]["layers"].items()
    assert name == "blocks.0.attn.qkv"
    text = f"{bits['weight']}/{bits['activation']}"
    assert re.search(rf"│ +0 │ +({text}|{bits['weight']}) │", shown)
    plan = tmp_path / "run" / "plan.json"
    again = Outcome("quantize", "--out", tmp_path / "again", "--plan", plan, *command)
    assert json.loads(again.out)["plan"] == report["plan"]
    first, second = (load_file(tmp_path / f / "model.safetensors") for f in ("run", "again"))
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_an_activation_budget_below_every_choice_is_one_sentence(tmp_path: Path) -> None:
    command = (*QUICK, "--no-joint", "--act-choices", "4,5")
    found = Outcome("quantize", "--out", tmp_path / "run", *command)
    assert found.code == 2
    assert found.err == (
        "lampq: no assignment averages 3 activation bits: the narrowest choice is 4 bits\n"
    )


def test_the_published_recipe_of_vtptq_is_two_flags(tmp_path: Path) -> None:
    flags = ("--metric", "nuclear", "--allocator", "vtptq", "--configurations", "9", "--json")
    found = Outcome("quantize", "--out", tmp_path / "run", *QUICK, *flags)
    assert found.code == 0
    report = json.loads(found.out)
    assert (report["solver"]["status"], report["solver"]["proven_optimal"]) == ("sampled", False)
    groups = json.loads((tmp_path / "run" / "sensitivity.json").read_text())["groups"]
    assert ["blocks.0.attn.qkv", "blocks.0.attn.proj"] in groups
    for first, second in groups:
        assert report["initial_plan"]["layers"][first] == report["initial_plan"]["layers"][second]


def test_a_finished_run_is_not_overwritten(finished: Path) -> None:
    before = {path.name: path.read_bytes() for path in finished.iterdir()}
    found = Outcome("quantize", "--out", finished, "--seed", 5, *QUICK)
    assert found.code == 2
    assert re.fullmatch(r"lampq: .*already holds a finished run: choose another --out\n", found.err)
    assert {path.name: path.read_bytes() for path in finished.iterdir()} == before


def test_a_finished_run_cannot_be_resumed(finished: Path) -> None:
    found = Outcome("quantize", "--out", finished, "--resume", *QUICK)
    assert found.code == 2
    assert "there is nothing to resume" in found.err
    assert (finished / "report.json").exists()


class Interruption:
    """Stands in for the progress's track and interrupts it at one item."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(
        self, _progress: object, items: Iterable[T], label: str, total: int | None = None
    ) -> Iterator[T]:
        for item in items:
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            yield item


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> int:
    """How many items a whole run tracks."""
    endless = Interruption(10**9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TerminalProgress, "track", lambda self, *a, **k: endless(self, *a, **k))
        out = tmp_path_factory.mktemp("events") / "run"
        assert Outcome("quantize", "--out", out, "--quiet", *QUICK).code == 0
    return 10**9 - endless.left


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.99])
def test_an_interrupted_run_is_resumed_to_the_same_result(
    finished: Path, events: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    command = ("quantize", "--out", tmp_path / "run", "--quiet", *QUICK)
    with monkeypatch.context() as patch:
        interruption = Interruption(int(share * events))
        patch.setattr(TerminalProgress, "track", lambda self, *a, **k: interruption(self, *a, **k))
        broken = Outcome(*command)
    assert broken.code == 130
    assert re.fullmatch(r"lampq: interrupted.*--resume\n", broken.err)
    kept = (tmp_path / "run" / "plan.json").exists()
    assert kept or share < 0.99
    assert ("best plan so far is written" in broken.err) == kept
    assert not (tmp_path / "run" / "report.json").exists()
    resumed = Outcome(*command, "--resume")
    assert (resumed.code, resumed.err) == (0, "")
    for name in ("model.safetensors", "plan.json", "sensitivity.json"):
        assert (tmp_path / "run" / name).read_bytes() == (finished / name).read_bytes()
    scores = [
        json.loads((folder / "report.json").read_text())["scores"]
        for folder in (finished, tmp_path / "run")
    ]
    assert scores[0] == scores[1]
    assert not (tmp_path / "run" / ".lampq").exists()


def test_an_interrupted_run_is_not_resumed_with_other_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("quantize", "--out", tmp_path / "run", *QUICK)
    with monkeypatch.context() as patch:
        patch.setattr(TerminalProgress, "track", lambda self, *a, **k: Interruption(0)(self, *a))
        assert Outcome(*command).code == 130
    found = Outcome(*command, "--seed", 1, "--resume")
    assert found.code == 2
    assert "had other options or inputs" in found.err


Bad = Callable[[Path], list[object]]


def _weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    state = load_model("fashion_vit").model.state_dict()
    change(state)
    save_file(state, folder / "w.safetensors")
    return folder / "w.safetensors"


def _file(folder: Path, name: str, content: bytes | str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def _pictures(folder: Path, table: bytes | str = "file,label\n0.png,1\n1.png,2\n") -> Path:
    samples = bundled_samples("eval")
    write_pictures(folder / "data", samples, 2)
    _file(folder / "data", "labels.csv", table)
    return folder / "data"


def _corrupt(folder: Path) -> Path:
    data = _pictures(folder)
    _file(data / "images", "1.png", b"\x89PNG no more")
    return data


def _broken_png(folder: Path) -> Path:
    data = _pictures(folder)
    content = (data / "images" / "1.png").read_bytes()
    _file(data / "images", "1.png", content[: len(content) // 2])
    return data


def _checkpoint(folder: Path, change: Callable[[bytes], bytes]) -> Path:
    return _file(folder, "m.safetensors", change((folder.parent / "source").read_bytes()))


def _header(change: Callable[[dict[str, Any]], object]) -> Bad:
    def build(folder: Path) -> list[object]:
        source = folder.parent / "source"
        with safe_open(source, framework="pt") as opened:
            content = json.loads(opened.metadata()["lampq"])
        change(content)
        tensors = load_file(source)
        content["digest"] = digest(content, tensors)
        save_file(tensors, folder / "m.safetensors", {"lampq": json.dumps(content)})
        return [folder / "m.safetensors"]

    return build


QUANTIZE: dict[str, tuple[Bad, str]] = {
    "wrong-calib": (lambda f: ["--calib", f / "none"], "no folder .*none"),
    "wrong-eval": (lambda f: ["--eval", f / "none"], "no folder .*none"),
    "empty-folder": (lambda f: ["--calib", f], "has neither labels.csv with images/ nor"),
    "corrupt-picture": (lambda f: ["--calib", _corrupt(f)], r"cannot read picture .*1\.png"),
    "half-a-picture": (lambda f: ["--eval", _broken_png(f)], r"cannot read picture .*1\.png"),
    "missing-picture": (
        lambda f: ["--calib", _pictures(f, "file,label\n9.png,1\n")],
        r"line 2: no picture .*9\.png",
    ),
    "labels-columns": (
        lambda f: ["--calib", _pictures(f, "name,class\n0.png,1\n")],
        "needs the columns file and label, found name, class",
    ),
    "labels-empty": (lambda f: ["--calib", _pictures(f, "")], "needs the columns file and label"),
    "labels-text": (
        lambda f: ["--calib", _pictures(f, "file,label\n0.png,boot\n")],
        "line 2: label 'boot' is no class index",
    ),
    "labels-short": (lambda f: ["--calib", _pictures(f, "file,label\n0.png\n")], "line 2: label"),
    "labels-superscript": (
        lambda f: ["--calib", _pictures(f, "file,label\n0.png,²\n")],
        "line 2: label",
    ),
    "labels-binary": (lambda f: ["--calib", _pictures(f, b"file,label\n\xff\xfe,1\n")], "labels"),
    "labels-high": (
        lambda f: ["--eval", _pictures(f, "file,label\n0.png,10\n")],
        "label 10 is outside the model's 10 classes",
    ),
    "unknown-model": (
        lambda f: ["vit_tinny", "--calib", _pictures(f)],
        "unknown model 'vit_tinny'",
    ),
    "no-calib": (
        lambda f: ["test_vit", "--weights", _test_vit(f)],
        "model 'test_vit' needs calibration pictures: give --calib DIR",
    ),
    "no-weights": (lambda f: ["--weights", f / "none.pth"], "no weights file .*none.pth"),
    "other-weights": (lambda f: ["--weights", _test_vit(f)], "tensor .* the model"),
    "damaged-weights": (
        lambda f: ["--weights", _file(f, "w.pth", "nothing")],
        "cannot read weights from .*w.pth",
    ),
    "nan-weights": (
        lambda f: ["--weights", _weights(f, lambda s: s["norm.weight"].fill_(float("nan")))],
        "tensor 'norm.weight' contains NaN",
    ),
    "method": (lambda f: ["--method", "adalgo"], "unknown method 'adalgo'; known: .*adalog"),
    "metric": (lambda f: ["--metric", "outputs"], "unknown metric 'outputs'; known: .*output"),
    "allocator": (lambda f: ["--allocator", "lp"], "unknown allocator 'lp'; known: ilp"),
    "preset": (lambda f: ["--preset", "quick"], "unknown preset 'quick'; known: best, paper"),
    "search": (lambda f: ["--search", "slow"], "search must be one of fast, exhaustive"),
    "edge-bits": (lambda f: ["--edge-bits", "wide"], "edge_bits must be one of target"),
    "choices": (lambda f: ["--choices", "2;3"], "choices must be numbers with commas between"),
    "choices-range": (lambda f: ["--choices", "2,11"], "choices must be different widths"),
    "target-size": (lambda f: ["--target-size", "3 apples"], "target-size must be like 3.5MB"),
    "target-size-huge": (lambda f: ["--target-size", "1e999"], "target-size|target_size"),
    "target-size-small": (lambda f: ["--target-size", "1kB"], "no assignment takes 1000 bytes"),
    "bits": (lambda f: ["--bits", "11"], r"bits must be in 1\.\.10, got 11"),
    "bits-nan": (lambda f: ["--bits", "nan"], "bits must be in"),
    "infeasible": (
        lambda f: ["--bits", "1.5"],
        r"no assignment averages 1\.5 bits: the narrowest choice is 2 bits",
    ),
    "images": (lambda f: ["--images", "0"], "images must be at least 1, got 0"),
    "seed-negative": (lambda f: ["--seed", "-1"], "seed must not be negative"),
    "seed-huge": (lambda f: ["--seed", str(2**70)], "seed"),
    "crop-pct": (lambda f: ["--crop-pct", "2"], r"crop-pct must be in \(0, 1\], got 2"),
    "mean": (lambda f: ["--mean", "a,b"], "mean must be numbers with commas between"),
    "mean-count": (lambda f: ["--mean", "0.1,0.2"], "the model has 1 channels, got 2 numbers"),
    "std-zero": (lambda f: ["--std", "0"], "std above zero"),
    "std-nan": (lambda f: ["--std", "nan"], "std"),
    "out-is-a-file": (
        lambda f: ["--out", _file(f, "taken", "x")],
        "--out .*taken' is a file, not a folder",
    ),
    "out-below-a-file": (lambda f: ["--out", _file(f, "taken", "x") / "run"], "taken"),
    "resume-nothing": (lambda f: ["--resume"], "holds no interrupted run to resume"),
    "no-config": (lambda f: ["--config", f / "none.toml"], "no configuration file .*none.toml"),
    "config-folder": (lambda f: ["--config", f], "configuration|TOML"),
    "config-syntax": (lambda f: ["--config", _file(f, "c.toml", "bits =")], "is not valid TOML"),
    "config-key": (
        lambda f: ["--config", _file(f, "c.toml", "bitz = 3")],
        "unknown option 'bitz'; known: ",
    ),
    "config-type": (
        lambda f: ["--config", _file(f, "c.toml", 'seed = "many"')],
        "seed must be a whole number, got 'many'",
    ),
    "no-plan": (lambda f: ["--plan", f / "none.json"], "no plan .*none.json"),
    "plan-folder": (lambda f: ["--plan", f], "plan"),
    "plan-syntax": (lambda f: ["--plan", _file(f, "p.json", "{")], r"p\.json' is no plan"),
    "plan-shape": (lambda f: ["--plan", _file(f, "p.json", '{"layers": [1]}')], "is no plan"),
    "plan-width": (
        lambda f: [
            "--plan",
            _file(f, "p.json", '{"layers": {"a": {"weight": 11, "activation": 11}}}'),
        ],
        r"weight bits must be in 1\.\.10, got 11",
    ),
    "plan-layer": (
        lambda f: [
            "--plan",
            _file(f, "p.json", '{"layers": {"a": {"weight": 3, "activation": 3}}}'),
        ],
        "the plan names 'a', which is no searched layer",
    ),
}


def _test_vit(folder: Path, classes: int = 7) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = timm.create_model("test_vit", num_classes=classes)
    save_file(model.state_dict(), folder / "test_vit.safetensors")
    return folder / "test_vit.safetensors"


def _one_line(found: Outcome, message: str) -> None:
    assert found.code == 2
    assert found.out == ""
    assert re.search(message, found.err)
    assert re.fullmatch(r"lampq: [^\n]+[^\n.]\n", found.err)


@pytest.mark.parametrize(("build", "message"), QUANTIZE.values(), ids=QUANTIZE)
def test_a_bad_input_of_quantize_is_one_line_and_exit_code_two(
    tmp_path: Path, build: Bad, message: str
) -> None:
    arguments = build(tmp_path)
    if "--out" not in arguments:
        arguments += ["--out", tmp_path / "run"]
    given = [a for i, a in enumerate(QUICK) if not _overridden(QUICK, i, arguments)]
    _one_line(Outcome("quantize", "--quiet", *given, *arguments), message)
    assert not (tmp_path / "run" / "report.json").exists()


def _overridden(quick: list[str], place: int, arguments: list[object]) -> bool:
    """Whether a flag of the quick options, or its value, is given anew."""
    flag = quick[place] if quick[place].startswith("--") else quick[place - 1]
    return flag in arguments


@pytest.mark.parametrize(
    "name", ["method", "metric", "allocator", "preset", "infeasible", "plan-layer", "crop-pct"]
)
def test_a_wrong_option_is_told_before_a_picture_is_read(
    tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(
        lampq.inputs, "read_folder", lambda *_, **__: pytest.fail("pictures are read")
    )
    build, message = QUANTIZE[name]
    arguments = [*build(tmp_path), "--calib", pictures, "--out", tmp_path / "run"]
    given = [a for i, a in enumerate(QUICK) if not _overridden(QUICK, i, arguments)]
    _one_line(Outcome("quantize", *given, *arguments), message)


EVAL: dict[str, tuple[Bad, str]] = {
    "missing": (lambda f: [f / "none"], "no checkpoint .*none"),
    "folder": (lambda f: [f], "no checkpoint"),
    "truncated": (lambda f: [_checkpoint(f, lambda b: b[:-100])], "is damaged or no safetensors"),
    "header-cut": (lambda f: [_checkpoint(f, lambda b: b[:50])], "is damaged or no safetensors"),
    "empty": (lambda f: [_checkpoint(f, lambda b: b"")], "is damaged or no safetensors"),
    "text": (lambda f: [_checkpoint(f, lambda b: b"hello" * 20)], "is damaged or no safetensors"),
    "float-weights": (lambda f: [_test_vit(f)], "no lampq checkpoint; float weights go with"),
    "newer": (
        _header(lambda c: c.update(format_version=99)),
        "format version 99, this lampq reads",
    ),
    "no-source": (_header(lambda c: c.pop("source")), "header"),
    "no-layers": (_header(lambda c: c.pop("layers")), "does not fit|header"),
}
ONLY_EVAL: dict[str, tuple[Bad, str]] = {
    "wrong-data": (lambda f: [f.parent / "source", "--data", f / "none"], "no folder .*none"),
    "corrupt-picture": (
        lambda f: [f.parent / "source", "--data", _corrupt(f)],
        "cannot read picture",
    ),
    "images": (lambda f: [f.parent / "source", "--images", 0], "images must be at least 1, got 0"),
    "labels-high": (
        lambda f: [f.parent / "source", "--data", _pictures(f, "file,label\n0.png,10\n")],
        "label 10 is outside the model's 10 classes",
    ),
    "unknown-model": (
        _header(lambda c: c["source"].update(name="fashion_bert")),
        "unknown bundled model 'fashion_bert'",
    ),
    "own-model": (_header(lambda c: c["source"].update(kind="user")), "give the float model"),
}


@pytest.fixture
def folder(tmp_path: Path, finished: Path) -> Path:
    """A folder to write into, with a good checkpoint beside it."""
    shutil.copy(finished / "model.safetensors", tmp_path / "source")
    (tmp_path / "case").mkdir()
    return tmp_path / "case"


@pytest.mark.parametrize("command", ["eval", "show"])
@pytest.mark.parametrize(("build", "message"), EVAL.values(), ids=EVAL)
def test_a_bad_checkpoint_is_one_line_and_exit_code_two(
    folder: Path, command: str, build: Bad, message: str
) -> None:
    _one_line(Outcome(command, *build(folder)), message)


@pytest.mark.parametrize(("build", "message"), ONLY_EVAL.values(), ids=ONLY_EVAL)
def test_a_bad_input_of_eval_is_one_line_and_exit_code_two(
    folder: Path, build: Bad, message: str
) -> None:
    _one_line(Outcome("eval", *build(folder)), message)


def test_show_of_a_header_without_configuration_is_no_traceback(folder: Path) -> None:
    arguments = _header(lambda c: [c.pop("config"), c.pop("plan")])(folder)
    found = Outcome("show", *arguments)
    assert found.code in (0, 2)
    assert found.code == 0 or re.fullmatch(r"lampq: [^\n]+\n", found.err)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2000000", 2_000_000),
        ("3.5MB", 3_500_000),
        ("300 kB", 300_000),
        ("1MiB", 1_048_576),
        ("2kib", 2048),
        ("12b", 12),
    ],
)
def test_sizes_are_read_with_their_units(text: str, expected: int) -> None:
    assert lampq.typed.size_in_bytes(text) == expected


def test_a_target_size_is_kept_by_the_file(tmp_path: Path) -> None:
    found = Outcome(
        "quantize", "--out", tmp_path / "run", "--target-size", "300kB", "--json", *QUICK
    )
    assert found.code == 0
    assert (tmp_path / "run" / "model.safetensors").stat().st_size <= 300_000


def test_a_timm_model_with_local_weights_goes_through_quantize_and_eval(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (6, 3, 160, 160), generator=generator, dtype=torch.uint8)
    data = write_pictures(
        tmp_path / "data", Samples(images, torch.arange(6), (0.5,) * 3, (0.5,) * 3), 6
    )
    found = Outcome(
        "quantize",
        "test_vit",
        "--weights",
        _test_vit(tmp_path),
        "--calib",
        data,
        "--eval",
        data,
        "--out",
        tmp_path / "run",
        "--json",
        *QUICK,
    )
    assert (found.code, found.err) == (0, "")
    report = json.loads(found.out)
    assert report["model"] == {"kind": "timm", "name": "test_vit", "options": {"num_classes": 7}}
    again = Outcome("eval", tmp_path / "run" / "model.safetensors", "--data", data, "--json")
    assert (again.code, again.err) == (0, "")
    assert json.loads(again.out)["top1"] == pytest.approx(report["scores"]["mixed"]["top1"])


def test_a_run_without_evaluation_pictures_reports_no_scores(
    pictures: Path, tmp_path: Path
) -> None:
    found = Outcome("quantize", "--calib", pictures, "--out", tmp_path / "run", *QUICK)
    assert found.code == 0
    assert json.loads((tmp_path / "run" / "report.json").read_text())["scores"] == {}


def test_a_run_for_people_prints_the_table_and_where_the_files_are(tmp_path: Path) -> None:
    found = Outcome("quantize", "fashion_swin", "--out", tmp_path / "run", *QUICK)
    assert found.code == 0
    assert all(word in found.out for word in ("fp32", "uniform", "mixed", "report.md", "smaller"))
    assert "Traceback" not in found.err


@pytest.mark.parametrize(
    "arguments",
    [["quantize", "--bits", "many"], ["quantize", "--colour", "red"], ["paint"], ["eval"]],
    ids=" ".join,
)
def test_arguments_that_cannot_be_parsed_end_with_exit_code_two(arguments: list[str]) -> None:
    found = Outcome(*arguments)
    assert found.code == 2
    assert "Traceback" not in found.err


def test_the_version_is_printed() -> None:
    assert Outcome("version").out == f"{lampq.__version__}\n"


@pytest.mark.slow
def test_the_module_runs_as_a_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lampq"]
    version = subprocess.run([*command, "version"], capture_output=True, text=True, check=True)
    assert version.stdout == f"{lampq.__version__}\n"
    wrong = subprocess.run(
        [*command, "show", str(tmp_path / "none")], capture_output=True, text=True, check=False
    )
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert re.fullmatch(r"lampq: no checkpoint [^\n]*\n", wrong.stderr)
