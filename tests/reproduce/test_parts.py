from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Outcome
from reproduce.test_table import balanced, rows_of_markdown, widths
from reproduce.tiny import make_files, read, reproduce, tiny_model

import lampq.reproduce.lab
from lampq.artifact.checkpoint import write_atomically
from lampq.compare import make_trials, quantized
from lampq.evaluate import predict, top1
from lampq.models import bundled_samples, load_model
from lampq.quant.modules import assemble
from lampq.reproduce import PARTS
from lampq.scoring import Run
from lampq.types import LayerBits


@pytest.fixture(scope="module", autouse=True)
def tiny() -> Iterator[None]:
    """The tiny model can be asked for."""
    with tiny_model():
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights and options."""
    return make_files(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def out(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All tables and figures of the tiny model."""
    folder = tmp_path_factory.mktemp("reproduce") / "all"
    found = reproduce(files, "all", folder)
    assert found.code == 0, found.err
    write_atomically(folder / "said", (found.out + found.err).encode())
    return folder


# those of classifiers; test_detection.py has the other
NAMES = [name for name, part in PARTS.items() if part.task == "classification"]
every_part = pytest.mark.parametrize("name", NAMES)


@every_part
def test_csv_and_markdown_have_the_same_values(out: Path, name: str) -> None:
    rows = rows_of_markdown((out / f"{name}.md").read_text())
    tables = sorted(out.glob(f"{name}*.csv"))
    assert tables
    listed = [row for path in tables for row in csv.reader(io.StringIO(path.read_text()))]
    assert rows == listed


@every_part
def test_latex_is_balanced_and_plain(out: Path, name: str) -> None:
    text = (out / f"{name}.tex").read_text()
    assert balanced(text)
    assert text.isascii()
    for table in text.split(r"\begin{table}")[1:]:
        assert len(widths(table)) == 1


@every_part
def test_pictures_are_there_in_three_forms(out: Path, name: str) -> None:
    assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert (out / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    assert "<svg" in (out / f"{name}.svg").read_text()


@every_part
def test_the_files_say_how_they_were_made(out: Path, name: str) -> None:
    found, text = read(out, name), (out / f"{name}.md").read_text()
    assert f"lampq reproduce {name} tiny" in text
    assert PARTS[name].place in text
    images = {"calibration": 12 if PARTS[name].calibrated else 0}
    images["evaluation"] = 20 if PARTS[name].scored else 0
    assert found["images"] == images
    assert f"seed {found['seed']}" in text
    assert found["date"] in text


@every_part
def test_tables_and_files_are_told(out: Path, name: str) -> None:
    said = (out / "said").read_text()
    assert f"{name}.md" in said
    assert f"{NAMES.index(name) + 1}/{len(NAMES)} {name}: done" in said


def test_all_leaves_detection_out_and_says_so(out: Path) -> None:
    said = " ".join((out / "said").read_text().split())
    assert "detection is left out: it needs a detector and COCO pictures" in said
    assert not (out / "detection.json").exists()


def test_the_classification_table_has_the_rows_of_the_paper(out: Path) -> None:
    rows = read(out, "classification")["result"]["rows"]
    four = ["qdrop", "ptq4vit", "pdquant", "repq", "optq", "erq", "adalog", "vtptq", "lampq"]
    three = ["qdrop", "ptq4vit", "repq", "adalog", "vtptq", "lampq"]
    assert [(row["key"], row["at"]) for row in rows] == [
        ("float", "32/32"),
        *((key, "4/4") for key in four),
        *((key, "3/3") for key in three),
    ]
    assert all("error" not in row for row in rows)


def test_the_float_accuracy_is_that_of_the_model(out: Path, files: Path) -> None:
    row = read(out, "classification")["result"]["rows"][0]
    samples = bundled_samples("eval").subset(20, 0)
    logits = predict(load_model("tiny", files / "tiny.safetensors").model, samples)
    assert row["top1"] == pytest.approx(top1(logits, samples.require_labels("a test")))


def test_the_zero_shot_table_has_the_rows_of_the_paper(out: Path) -> None:
    found = read(out, "zero-shot")["result"]
    assert [(row["key"], row["at"]) for row in found["rows"][1:]] == [
        (key, at) for at in ("4/8", "8/8") for key in ("psaq", "vtptq", "lampq")
    ]
    assert found["pictures"] == {"images": 12, "steps": 2}


def test_the_ablation_has_its_ideas_in_columns(out: Path) -> None:
    rows = list(csv.DictReader(io.StringIO((out / "ablation.csv").read_text())))
    marks = {row["method"]: [row[idea] for idea in ("MPQ", "I1", "I2", "I3")] for row in rows}
    yes, no = "✓", ""
    assert marks == {
        "Base": [no, no, no, no],
        "Base + VT-PTQ": [yes, no, no, no],
        "Base + I1 + I2": [yes, yes, yes, no],
        "Base + I1 + I3": [yes, yes, no, yes],
        "LampQ": [yes, yes, yes, yes],
    }
    tried = {row["method"]: row["exchanges"] for row in rows}
    assert tried["Base + I1 + I2"] == "0 of 0"
    assert tried["Base + I1 + I3"] != "0 of 0"


def test_allocations_keep_the_budget_and_the_modules_of_vtptq(out: Path) -> None:
    result = read(out, "allocation")["result"]
    sizes = {"qkv": 3, "proj": 1, "fc1": 4, "fc2": 4}
    for method, blocks in result["widths"].items():
        taken = sum(sizes[role] * bits for row in blocks.values() for role, bits in row.items())
        assert taken <= 3 * 12 * len(blocks)
        assert result["means"][method] == pytest.approx(taken / 12 / len(blocks))
    for row in result["widths"]["VT-PTQ"].values():
        assert row["qkv"] == row["proj"]
        assert row["fc1"] == row["fc2"]


def test_the_metric_is_scaled_by_the_factor_of_its_type(out: Path) -> None:
    result = read(out, "metric")["result"]
    for block in result["values"].values():
        for role, trace in block["Fisher trace"].items():
            scaled = block["LampQ: scaled trace"][role]
            assert scaled == pytest.approx(result["role_scale"][role] * trace)
    norms = [block["VT-PTQ: nuclear norm"] for block in result["values"].values()]
    means = [sum(row[name] for row in norms) / 2 for name in ("MSA", "MLP")]
    spread = max(means) / min(means)
    assert result["spread"]["VT-PTQ: nuclear norm"] == pytest.approx(spread)


def test_components_are_the_only_thing_quantized(out: Path, files: Path) -> None:
    result = read(out, "sensitivity")["result"]
    assert list(result["accuracy"]) == ["0", "1"]
    assert all(
        list(row) == ["block", "MSA", "MLP", "qkv", "proj", "fc1", "fc2"]
        for row in result["accuracy"].values()
    )
    loaded = load_model("tiny", files / "tiny.safetensors")
    options = {"preset": "paper", "images": 12, "fit_images": 4, "method": "minmax"}
    options |= {"score_images": 8, "metric_images": 4, "probe_images": 8, "trace_images": 2}
    (trial,) = make_trials(options, plans=("uniform",), bits=(3,))
    samples = bundled_samples("calib").subset(20, 0)
    fits = quantized(loaded, samples, trial.config, Run()).fits
    one = LayerBits(1, 1)
    names = [layer.name for layer in fits.graph.allocatable if layer.block == 1]
    evaluation = bundled_samples("eval").subset(20, 0)
    labels = evaluation.require_labels("a test")
    for key, chosen in (("block", names), ("MSA", names[:2]), ("fc2", names[3:])):
        model = assemble(fits.model, [fits.layer(name, one) for name in chosen])
        expected = top1(predict(model, evaluation), labels)
        assert result["accuracy"]["1"][key] == pytest.approx(expected)


def test_drops_of_the_partly_quantized_model_count_from_its_own_accuracy(out: Path) -> None:
    partly = read(out, "partly-quantized")["result"]
    single = read(out, "sensitivity")["result"]
    assert partly["whole"]["float"] == single["float"]
    for role in ("qkv", "fc1"):
        for block, drop in partly["drops"]["float"][role].items():
            assert drop == pytest.approx(single["float"] - single["accuracy"][block][role])


def test_the_hyperparameters_are_the_ranges_of_the_paper(out: Path) -> None:
    rows = read(out, "hyperparameters")["result"]["rows"]
    values = {
        "gamma": ["2", "4", "6", "8", "10", "15", "20"],
        "beta": ["1", "2", "3", "4"],
        "mu": ["0.25", "0.5", "0.75", "1"],
        "choices": ["{1, 2, 3, 4, 5}", "{1, 2, 3, 4}", "{2, 3, 4, 5}", "{2, 3, 4}"],
    }
    assert [(row["parameter"], row["value"]) for row in rows] == [
        (name, value) for name, some in values.items() for value in some
    ]
    assert [row["value"] for row in rows if row["default"]] == ["4", "2", "0.5", "{1, 2, 3, 4, 5}"]
    # the same options give the same model, whichever range they are in
    assert len({row["top1"] for row in rows if row["default"]}) == 1


def test_the_best_value_is_chosen_on_calibration_images(out: Path) -> None:
    rows = list(csv.DictReader(io.StringIO((out / "hyperparameters.csv").read_text())))
    for name in ("gamma", "beta", "mu", "choices"):
        own = [row for row in rows if row["hyper-parameter"] == name]
        (best,) = [row for row in own if row["best on calibration images"]]
        scores = [float(row["on calibration images [%]"]) for row in own]
        assert float(best["on calibration images [%]"]) == max(scores)


def test_times_are_ratios_to_the_base_method(out: Path) -> None:
    found = read(out, "runtime")["result"]
    seconds = {row["key"]: row["cpu_seconds"] for row in found["rows"]}
    rows = list(csv.DictReader(io.StringIO((out / "runtime.csv").read_text())))
    ratios = [float(row["x base"]) for row in rows]
    expected = [1, seconds["vtptq"] / seconds["base"], seconds["lampq"] / seconds["base"], 5]
    assert ratios == pytest.approx(expected, abs=0.051)


def test_a_second_run_computes_nothing(
    out: Path, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object, **_named: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(lampq.reproduce.lab, "quantized", refuse)
    monkeypatch.setattr(lampq.reproduce.lab, "fit_cache", refuse)
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    (out / "ablation.md").unlink()
    (out / "ablation.svg").unlink()
    for name in NAMES:
        more = () if name == "ablation" else ("--no-pictures",)
        found = reproduce(files, name, out, *more)
        assert found.code == 0, found.err
        assert f"1/1 {name}: was finished before" in found.err
    after = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    same = {name for name in before if name.startswith("ablation") or not name.endswith(".md")}
    assert {name: after[name] for name in same} == {name: before[name] for name in same}


def test_another_model_or_other_options_are_refused_in_the_same_folder(
    out: Path, files: Path
) -> None:
    found = reproduce(files, "ablation", out, "--seed", "1")
    assert found.code == 2
    assert "was made with other options: give the same ones, or another --out" in found.err
    found = Outcome("reproduce", "sensitivity", "--seed", 1, "--out", out)
    assert found.code == 2


def test_json_is_the_content_of_the_files(out: Path, files: Path) -> None:
    found = reproduce(files, "metric", out, "--json")
    assert json.loads(found.out) == {"results": [read(out, "metric")]}
