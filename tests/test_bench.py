"""The benchmark: turns, ratios, words, JSON and pictures. Times themselves are not tested."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Case, Outcome, few_bundled
from typer.testing import CliRunner

from lampq import bench
from lampq.artifact.checkpoint import checkpoint_bytes, read_header
from lampq.bench import contenders, measure
from lampq.bench.chart import chart
from lampq.bench.measure import Ratio, in_turns
from lampq.cli import app
from lampq.errors import ConfigError, MissingDependencyError
from lampq.graph.attention import explicit
from lampq.graph.discover import discover
from lampq.methods import METHODS, FitCache, SiteWidths
from lampq.models import ModelSource, load_model
from lampq.report.folder import read_run
from lampq.types import BitPlan, LayerBits, LayerRole


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the bundled Swin with a plan by hand, some layers below eight bits."""
    out = tmp_path_factory.mktemp("bench") / "run"
    layers = discover(explicit(load_model("fashion_swin").model)).allocatable
    plan = {
        layer.name: {"weight": 8 if layer.role is LayerRole.FC1 else 4, "activation": 8}
        for layer in layers
    }
    by_hand = out.with_name("plan.json")
    by_hand.write_text(json.dumps({"layers": plan}))
    words = ["quantize", "fashion_swin", "--out", str(out), "--plan", str(by_hand), "--quiet"]
    words += ["--method", "minmax", "--profile", "speed", "--bits", "8"]
    with few_bundled(4):
        found = Outcome(*words)
    assert (found.code, found.out, found.err) == (0, "", "")
    return out


@pytest.fixture
def packed(folder: Path) -> Path:
    """Its packed file."""
    return folder / "model.safetensors"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tools that take long: the probe of bf16 and NNCF."""
    monkeypatch.setattr(contenders, "has_bf16", lambda: False)
    monkeypatch.setitem(sys.modules, "nncf", None)
    monkeypatch.setattr(measure, "TURN", 0.0)


class FakeClock:
    """A clock that runs can turn forward."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_contenders_take_turns_and_the_shortest_run_of_a_turn_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeClock()
    monkeypatch.setitem(measure.CLOCKS, "wall", clock)
    monkeypatch.setattr(measure, "TURN", 3.0)
    order: list[str] = []
    lengths = {"slow": [3.0], "fast": [1.0, 1.0, 2.0, 1.5, 1.0]}
    counts = {"slow": 0, "fast": 0}

    def run(name: str) -> Any:
        def once() -> None:
            taken = lengths[name][counts[name] % len(lengths[name])]
            counts[name] += 1
            order.append(name)
            clock.now += taken

        return once

    times = in_turns({"slow": run("slow"), "fast": run("fast")}, rounds=2)
    assert times == {"slow": [3.0, 3.0], "fast": [1.0, 1.0]}
    # three runs to warm up, then turns of three seconds but two runs at least, starting with
    # another one each round
    assert order[6:] == [*["slow"] * 2, *["fast"] * 3, *["fast"] * 3, *["slow"] * 2]


def test_a_ratio_is_taken_round_by_round() -> None:
    ratio = Ratio.of([2.0, 6.0, 3.0], [1.0, 2.0, 3.0])
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 1.0, 3.0)


def test_all_forms_are_measured_and_explained(packed: Path, quick: None) -> None:
    before = torch.get_num_threads()
    found = bench.bench(packed, bench.settings(batches=(1, 2), threads=(1,), rounds=2))
    assert torch.get_num_threads() == before
    forms = [(row["runtime"], row["kind"]) for row in found["rows"] if row["batch"] == 1]
    assert forms == [
        ("torch", "fp32"),
        ("onnxruntime", "fp32"),
        ("onnxruntime", "int8"),
        ("onnxruntime", "lampq"),
        ("openvino", "fp32"),
        ("openvino", "lampq"),
    ]
    for row in found["rows"]:
        assert row["images_per_second"] == pytest.approx(1e3 * row["batch"] / row["milliseconds"])
        for ratio in (row["against_torch"], row["against_runtime"]):
            assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
        if row["kind"] == "fp32":
            assert row["against_runtime"]["median"] == 1
    size = found["size"]
    assert size["bytes"] == packed.stat().st_size
    parameters = sum(p.numel() for p in load_model("fashion_swin").model.parameters())
    assert size["smaller"] == pytest.approx(4 * parameters / size["bytes"])
    assert (size["layers"], size["layers_below_8_bits"]) == (19, 12)
    assert size["layers_above_8_bits"] == 0
    assert set(found["load_seconds"]) == {"onnxruntime", "openvino"}
    said = " ".join(found["remarks"])
    assert "12 of 19 layers have fewer than 8 bits" in said
    assert "make the file smaller" in said
    assert "not faster" in said
    assert "there is no bf16 row" in said
    assert "pip install 'lampq[bench]'" in said
    json.dumps(found)


def rows(**milliseconds: float) -> list[dict[str, Any]]:
    base = {"runtime": "openvino", "threads": 1, "batch": 1}
    plain = milliseconds["fp32"]
    return [
        {
            **base,
            "kind": kind,
            "milliseconds": value,
            "against_torch": {"median": 30 / value, "low": 28 / value, "high": 33 / value},
            "against_runtime": {"median": plain / value},
        }
        for kind, value in milliseconds.items()
    ]


def story(below: int, times: list[dict[str, Any]], profile: str = "speed", above: int = 0) -> str:
    size = {
        "bytes": 2_000_000,
        "float_bytes": 20_000_000,
        "smaller": 10.0,
        "bytes_at_8_bits": 5_000_000,
        "layers": 10,
        "layers_below_8_bits": below,
        "layers_above_8_bits": above,
    }
    found = {"size": size, "rows": times, "missing": [], "profile": profile}
    return " ".join(bench.remarks(found))


def test_what_is_better_without_lampq_is_said() -> None:
    said = story(4, rows(fp32=20.0, bf16=8.0, int8=9.9, lampq=10.0))
    assert "3.00 times faster than torch, 2.00 times faster than openvino without" in said
    assert "unquantized bf16 is faster than this model" in said
    assert "own 8-bit form" not in said  # within five percent
    slower = story(4, rows(fp32=20.0, int8=10.0, lampq=25.0))
    assert "1.25 times slower than openvino without" in slower
    assert "fp32 and the runtime's own 8-bit form are faster than this model" in slower


def test_the_faster_profile_is_pointed_at() -> None:
    times = rows(fp32=20.0, lampq=10.0)
    assert "lampq export RUN --profile speed" in story(4, times, "accuracy")
    assert "--profile" not in story(4, times, "speed")


def test_a_busy_machine_is_told() -> None:
    times = rows(fp32=20.0, lampq=10.0)
    assert "the machine is busy" not in story(4, times)
    times[-1]["against_torch"] = {"median": 3.0, "low": 1.4, "high": 3.1}
    assert "the machine is busy. Measure again" in story(4, times)


def test_widths_below_eight_bits_are_only_explained_where_there_are_any() -> None:
    times = rows(fp32=20.0, lampq=20.0)
    assert "fewer than 8 bits" not in story(0, times)
    assert "as fast as openvino without" in story(0, times)
    assert "smaller, not faster. With 8 bits for all layers it would have 5 MB." in story(3, times)


def test_layers_that_are_too_wide_for_integers_are_told() -> None:
    times = rows(fp32=20.0, lampq=20.0)
    assert "more than 8 bits" not in story(3, times)
    said = story(0, times, above=2)
    assert "2 of 10 layers have a weight or an input of more than 8 bits: they run in float" in said
    assert "fewer than 8 bits" not in said


def test_sizes_are_those_of_eight_bits_also_where_layers_are_wider(
    vit: Case, tmp_path: Path
) -> None:
    layers = vit.graph.allocatable
    sites = SiteWidths(LayerBits(8, 8), 8)
    fits = FitCache(vit.model, vit.graph, METHODS.get("minmax")(), vit.stats, sites)
    wide, narrow = layers[0].name, layers[3].name
    plan = BitPlan.uniform(layers, LayerBits(8, 8))
    mixed = plan.with_bits(wide, LayerBits(10, 8)).with_bits(narrow, LayerBits(5, 9))
    files = {}
    for name, one in (("even", plan), ("mixed", mixed)):
        files[name] = tmp_path / f"{name}.safetensors"
        files[name].write_bytes(
            checkpoint_bytes(fits.assembled(one), ModelSource("user", "Tiny", {}), {})
        )
    size = bench._sizes(files["mixed"], read_header(files["mixed"]), 1000)
    assert (size["layers_below_8_bits"], size["layers_above_8_bits"]) == (1, 2)
    # zero points above 255 take two bytes
    rows_of_wide = 72
    assert abs(size["bytes_at_8_bits"] - files["even"].stat().st_size) <= rows_of_wide + 64
    assert bench._sizes(files["even"], read_header(files["even"]), 1000)["bytes_at_8_bits"] == (
        files["even"].stat().st_size
    )


@pytest.mark.parametrize(("form", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_chart_is_drawn(form: str, start: bytes) -> None:
    times = rows(fp32=20.0, lampq=10.0)
    size = {"bytes": 1e6, "float_bytes": 8e6, "bytes_at_8_bits": 2e6}
    content = chart({"size": size, "rows": times, "model": "tiny", "rounds": 3}, form)
    assert content.startswith(start)
    assert len(content) > 5000


def test_the_page_gets_the_time_of_the_fastest_runtime_on_the_fewest_threads() -> None:
    one, two = rows(fp32=20.0, lampq=10.0), rows(fp32=12.0, lampq=6.0)
    for row in two:
        row["threads"] = 2
    torch_rows = [{**row, "runtime": "torch", "milliseconds": 30.0} for row in (one[0], two[0])]
    slower = [{**row, "runtime": "onnxruntime", "milliseconds": 25.0} for row in one]
    found = {"clock": "cpu", "rows": [*two, *torch_rows, *slower, *one]}
    assert bench.for_page(found) == {
        "fp32": 30.0,
        "mixed": 10.0,
        "note": "CPU time in openvino on one thread; float32 is eager torch, "
        "openvino takes 20 ms for it",
    }
    large = [{**row, "batch": 32} for row in found["rows"]]
    assert bench.for_page({"clock": "cpu", "rows": large}) is None


def test_the_command_fills_the_page_of_a_run_folder(
    folder: Path, quick: None, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(folder, tmp_path / "run"))
    words = ["--runtimes", "onnxruntime", "--batches", "1", "--rounds", "1", "--threads", "1"]
    alone = CliRunner().invoke(app, ["bench", str(run / "model.safetensors"), *words, "--quiet"])
    assert alone.exit_code == 0, alone.stderr
    assert not (run / "speed.json").exists()
    printed = CliRunner().invoke(app, ["bench", str(run), *words, "--json"])
    assert printed.exit_code == 0, printed.stderr
    times = {(row["runtime"], row["kind"]): row for row in json.loads(printed.stdout)["rows"]}
    speed = read_run(run).speed
    assert speed is not None
    assert speed["mixed"] == times["onnxruntime", "lampq"]["milliseconds"]
    assert speed["fp32"] == times["torch", "fp32"]["milliseconds"]
    assert json.dumps(speed["note"])[1:-1] in (run / "report.html").read_text()


def test_the_command_writes_numbers_and_pictures(packed: Path, quick: None, tmp_path: Path) -> None:
    words = ["bench", str(packed), "--runtimes", "onnxruntime", "--batches", "1", "--rounds", "1"]
    words += ["--threads", "1", "--out", str(tmp_path / "bench")]
    printed = CliRunner().invoke(app, [*words, "--json"])
    assert printed.exit_code == 0, printed.stderr
    found = json.loads(printed.stdout)
    assert json.loads((tmp_path / "bench" / "bench.json").read_text()) == found
    assert {path.name for path in (tmp_path / "bench").iterdir()} == {
        "bench.json",
        "bench.png",
        "bench.svg",
    }
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0
    assert "1 image, 1 thread" in shown.stdout
    assert "x torch fp32" in shown.stdout
    (tmp_path / "file").write_text("")
    refused = CliRunner().invoke(app, [*words[:-1], str(tmp_path / "file")])
    assert refused.exit_code == 2
    assert refused.stderr.endswith("is a file, and the numbers go into a folder\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batches": (0,)}, "batches must be whole numbers from 1 on"),
        ({"threads": ()}, "threads must be whole numbers from 1 on"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"clock": "sun"}, "clock must be wall or cpu"),
        ({"runtimes": ("torch",)}, "a benchmark needs onnxruntime or openvino"),
        ({"runtimes": ("tvm",)}, "unknown runtime 'tvm'"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bench.settings(**options)


def test_a_missing_matplotlib_is_told_before_anything_is_timed(
    packed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    found = CliRunner().invoke(app, ["bench", str(packed), "--out", str(tmp_path / "out")])
    assert found.exit_code == 2
    assert found.stderr == "lampq: the chart needs matplotlib: pip install 'lampq[bench]'\n"
    assert not (tmp_path / "out").exists()


def test_the_probe_of_bf16_survives_a_process_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "BF16_PROBE", "import os; os.abort()")
    assert not contenders.has_bf16()
    monkeypatch.setattr(contenders, "BF16_PROBE", "pass")
    assert contenders.has_bf16()


def test_nncf_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nncf", None)
    with pytest.raises(MissingDependencyError, match="is made by NNCF, which is not installed"):
        contenders.OWN_INT8["openvino"](b"", (3, 8, 8))
