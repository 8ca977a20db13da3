"""lampq export, lampq eval --runtime: what is written is verified, or nothing is written."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from conftest import Case, Outcome, few_bundled

import lampq
import lampq.cli
import lampq.export
import lampq.verify
from lampq.cli.deploy import _settings
from lampq.config import make_config
from lampq.data import Samples
from lampq.errors import ConfigError, ExportError

QUICK = [
    *("--method", "adalog", "--choices", "3,4", "--bits", "3.5", "--images", "48"),
    *("--fit-images", "4", "--metric-images", "4", "--score-images", "4", "--exchanges", "0"),
]


@pytest.fixture(scope="module", autouse=True)
def few_pictures() -> Iterator[None]:
    """The bundled pictures, but only 60 of each split."""
    with few_bundled(60):
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run on the bundled Swin."""
    out = tmp_path_factory.mktemp("export") / "run"
    found = Outcome("quantize", "fashion_swin", "--out", out, "--quiet", *QUICK)
    assert (found.code, found.out, found.err) == (0, "", "")
    return out


@pytest.fixture(scope="module")
def exported(finished: Path) -> dict[str, Any]:
    """What the export of that run says."""
    found = Outcome("export", finished, "--to", "onnx", "--images", "24", "--json")
    assert (found.code, found.err) == (0, "")
    content: dict[str, Any] = json.loads(found.out)
    return content


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of the run folder as it was before the export."""
    shutil.copytree(finished, tmp_path / "run", ignore=shutil.ignore_patterns("*.onnx", "speed"))
    return tmp_path / "run"


def test_an_export_is_verified_in_both_runtimes(finished: Path, exported: dict[str, Any]) -> None:
    assert exported["file"] == str(finished / "model.onnx")
    assert exported["bytes"] == (finished / "model.onnx").stat().st_size
    assert exported["profile"] == "accuracy"
    report = json.loads((finished / "report.json").read_text())
    assert exported["top1"] == report["scores"]["mixed"]["top1"]
    assert [one["runtime"] for one in exported["verified"]] == ["onnxruntime", "openvino"]
    for one in exported["verified"]:
        assert 0 < one["error"] <= 1e-6
        # a code on the border of two values may fall otherwise on another processor
        assert one["agreement"] >= 99 or one["own_agreement"] is not None
        assert one["agreement"] > 90
        assert one["images"] == 24
        # qkv and fc1 of four blocks, reduction and head; proj has ranges per token
        assert one["integer"] == 10
        assert len(one["floating"]) == 9


def test_the_file_is_a_standard_graph_with_its_story_in_the_metadata(
    finished: Path, exported: dict[str, Any]
) -> None:
    model = onnx.load(exported["file"])
    onnx.checker.check_model(model, full_check=True)
    assert {node.domain for node in model.graph.node} == {""}
    assert [entry.domain for entry in model.opset_import] == [""]
    (entry,) = model.metadata_props
    about = json.loads(entry.value)
    plan = json.loads((finished / "plan.json").read_text())["layers"]
    assert about["plan"] == {n: [b["weight"], b["activation"]] for n, b in plan.items()}
    assert about["preprocessing"]["size"] == 28
    sides = model.graph.input[0].type.tensor_type.shape.dim
    shapes = [side.dim_param or side.dim_value for side in sides]
    assert shapes == ["batch", 1, 28, 28]


@pytest.mark.parametrize("name", ["model.safetensors", "model.onnx"])
@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_the_deployed_form_is_scored(
    finished: Path, exported: dict[str, Any], name: str, runtime: str
) -> None:
    del exported  # the file is there
    report = json.loads((finished / "report.json").read_text())
    found = Outcome("eval", finished / name, "--runtime", runtime, "--json")
    assert (found.code, found.err) == (0, "")
    scored = json.loads(found.out)
    assert scored["runtime"] == runtime
    assert scored["images"] == 60
    assert abs(scored["top1"] - report["scores"]["mixed"]["top1"]) <= 100 / 60


def test_a_plan_is_fitted_again_for_the_other_profile(run: Path) -> None:
    words = ("export", run, "--profile", "speed", "--images", "24", "--quiet")
    found = Outcome(*words)
    assert (found.code, found.err) == (0, "")
    assert "profile speed" in found.out
    assert "18 layers on integer kernels, 1 in float by design" in found.out
    assert not (run / "model.onnx").exists()
    assert {path.name for path in (run / "speed").iterdir()} == {
        "model.safetensors",
        "model.onnx",
        "plan.json",
        "histograms.json",
        "report.json",
        "report.md",
        "report.html",
    }
    assert (run / "speed" / "plan.json").read_text() == (run / "plan.json").read_text()
    report = json.loads((run / "speed" / "report.json").read_text())
    assert report["config"]["profile"] == "speed"
    assert f"top-1 of this profile {report['scores']['mixed']['top1']:.2f} %" in found.out
    # it is there now, and is not fitted again
    before = (run / "speed" / "model.safetensors").stat().st_mtime_ns
    assert Outcome(*words).code == 0
    assert (run / "speed" / "model.safetensors").stat().st_mtime_ns == before


FAILURES: dict[str, tuple[dict[str, Any], str]] = {
    "a layer": ({"TOLERANCE": 1e-12}, r"lampq: layer '\S+' in onnxruntime differs from torch by"),
    "answers": (
        {"_share": lambda *_: 12.0, "_own_agreement": lambda *_: 90.0},
        r"lampq: onnxruntime agrees with torch on 12\.00 % of 24 images",
    ),
}


@pytest.mark.parametrize(("patches", "message"), FAILURES.values(), ids=FAILURES)
def test_an_export_that_fails_leaves_nothing_on_disk(
    run: Path, monkeypatch: pytest.MonkeyPatch, patches: dict[str, Any], message: str
) -> None:
    for name, value in patches.items():
        monkeypatch.setattr(lampq.verify, name, value)
    before = sorted(path.name for path in run.iterdir())
    found = Outcome("export", run, "--images", "24", "--runtimes", "onnxruntime", "--quiet")
    assert found.code == 2
    assert found.out == ""
    assert_one_sentence(found.err, message)
    assert sorted(path.name for path in run.iterdir()) == before


def assert_one_sentence(text: str, expected: str) -> None:
    import re

    assert re.match(expected, text), text
    assert text.count("\n") == 1


def test_a_failed_export_leaves_the_file_of_an_earlier_one(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "model.onnx").write_bytes(b"earlier")
    monkeypatch.setattr(lampq.verify, "TOLERANCE", 1e-12)
    assert Outcome("export", run, "--images", "8", "--runtimes", "onnxruntime").code == 2
    assert (run / "model.onnx").read_bytes() == b"earlier"


WRONG: dict[str, tuple[list[str], str]] = {
    "format": (["--to", "tflite"], "lampq: unknown format 'tflite'; known: onnx"),
    "profile": (["--profile", "size"], "lampq: unknown profile 'size'; known: accuracy, speed"),
    "images": (["--images", "0"], "lampq: images must be at least 1, got 0"),
    "runtime": (["--runtimes", "tvm"], "lampq: unknown runtime 'tvm'"),
    "torch": (["--runtimes", "torch"], "lampq: an export is verified in onnxruntime or openvino"),
    "calibration": (["--calib", "/nowhere"], "lampq: no folder '/nowhere'"),
    "name": (["--out", "model.bin"], "lampq: the file to write must be called like model.onnx, g"),
}


@pytest.mark.parametrize(("words", "message"), WRONG.values(), ids=WRONG)
def test_wrong_words_are_one_sentence(finished: Path, words: list[str], message: str) -> None:
    found = Outcome("export", finished, *words)
    assert (found.code, found.out) == (2, "")
    assert_one_sentence(found.err, message)


def test_a_folder_without_a_run_is_told(tmp_path: Path) -> None:
    found = Outcome("export", tmp_path)
    assert found.code == 2
    assert_one_sentence(found.err, r"lampq: no checkpoint '.*model\.safetensors'")


def test_a_checkpoint_alone_is_exported_but_not_fitted_again(run: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone" / "model.safetensors"
    alone.parent.mkdir()
    shutil.copy(run / "model.safetensors", alone)
    out = tmp_path / "deploy" / "swin.onnx"
    words = ("--images", "8", "--runtimes", "onnxruntime", "--out", out, "--quiet")
    found = Outcome("export", alone, *words)
    assert (found.code, found.err) == (0, "")
    assert out.is_file()
    again = Outcome("export", alone, "--profile", "speed")
    assert again.code == 2
    assert_one_sentence(again.err, "lampq: the checkpoint was quantized for accuracy: to fit its ")


def test_calibration_pictures_that_are_gone_are_asked_for(run: Path) -> None:
    report = json.loads((run / "report.json").read_text())
    report["data"]["calib"] = "/no/longer/here"
    (run / "report.json").write_text(json.dumps(report))
    found = Outcome("export", run)
    assert found.code == 2
    assert_one_sentence(found.err, "lampq: the calibration pictures of the run are no longer in")


def test_a_damaged_report_is_told(run: Path) -> None:
    (run / "report.json").write_text("{")
    found = Outcome("export", run)
    assert found.code == 2
    assert_one_sentence(found.err, r"lampq: '.*report\.json' is no JSON")


def test_no_runtime_at_all_is_told(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lampq.export, "installed", lambda: ())
    found = Outcome("export", finished)
    assert found.code == 2
    assert_one_sentence(found.err, r".*pip install 'lampq\[onnx\]' 'lampq\[openvino\]'")


def test_a_missing_runtime_is_told_by_eval(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    found = Outcome("eval", finished / "model.safetensors", "--runtime", "openvino")
    assert found.code == 2
    assert_one_sentence(found.err, r".*pip install 'lampq\[openvino\]'")


@pytest.mark.parametrize("damage", ["cut", "byte"])
def test_a_damaged_onnx_file_is_one_sentence(
    exported: dict[str, Any], tmp_path: Path, damage: str
) -> None:
    content = bytearray(Path(exported["file"]).read_bytes())
    if damage == "cut":
        del content[-1000:]
    else:
        content[len(content) // 2] ^= 1
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    found = Outcome("eval", path)
    assert (found.code, found.out) == (2, "")
    assert_one_sentence(found.err, r"lampq: '.*model\.onnx' ")


def test_a_method_without_uniform_inputs_cannot_be_exported_for_speed(
    vit: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = lampq.quantize(
        vit.original, vit.samples, method="adalog", choices=[4], bits=4, exchanges=0
    )
    path = tmp_path / "model.safetensors"
    result.save(path)
    monkeypatch.setattr(lampq.export, "profile_of", lambda header: "speed")
    with pytest.raises(ExportError, match=r"'blocks\.0\.attn\.proj' was to be quantized for"):
        lampq.export_onnx(path, tmp_path / "model.onnx", vit.samples, model=vit.original)
    assert not (tmp_path / "model.onnx").exists()


def test_a_plain_uniform_run_is_exported_from_python(vit: Case, tmp_path: Path) -> None:
    result = lampq.quantize(
        vit.original,
        vit.samples,
        profile="speed",
        method="minmax",
        choices=[8],
        bits=8,
        exchanges=0,
    )
    path = tmp_path / "model.safetensors"
    result.save(path)
    done = lampq.export_onnx(
        path,
        tmp_path / "model.onnx",
        Samples(vit.samples.images),
        model=vit.original,
        runtimes=("onnxruntime",),
    )
    assert done.profile == "speed"
    assert len(done.verified[0].integer) == 10
    session = lampq.load(tmp_path / "model.onnx", runtime="onnxruntime")
    with torch.no_grad():
        expected = result.model(vit.samples.images)
    assert float((session(vit.samples.images) - expected).abs().max()) < 0.05


def test_torch_is_no_runtime_to_verify_in(vit: Case, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is verified in onnxruntime or openvino"):
        lampq.export_onnx("x", tmp_path / "y", vit.samples, runtimes=("torch",))


@pytest.mark.parametrize("joint", [True, False])
def test_choices_that_are_too_wide_for_speed_do_not_keep_a_plan_from_it(joint: bool) -> None:
    run = make_config({"bits": 8, "act_bits": 7, "joint": joint}).to_json()
    assert max(run["choices"]) == 10
    again = _settings(run, "speed")
    assert again.choices == (6, 7, 8)
    assert again.act_choices == (None if joint else (6, 7, 8))
    assert _settings(again.to_json(), "accuracy").choices == (6, 7, 8)
    with pytest.raises(ConfigError, match=r"edge_bits must be in 1\.\.8 with profile speed"):
        _settings({**run, "edge_bits": 9}, "speed")


@pytest.mark.parametrize("sites", ["published", "inputs"])
def test_a_run_of_psaq_is_exported_from_python(vit: Case, tmp_path: Path, sites: str) -> None:
    result = lampq.quantize(
        vit.original,
        vit.samples,
        **{"method": "psaq", "sites": sites, "metric": "recon", "exchanges": 0},
        **{"choices": [8, 9], "bits": 8.5, "act_bits": 8, "edge_bits": 10, "fallback": "none"},
    )
    path = tmp_path / "model.safetensors"
    result.save(path)
    done = lampq.export_onnx(
        path, tmp_path / "model.onnx", Samples(vit.samples.images), model=vit.original
    )
    wide = [name for name, bits in result.plan.items() if max(bits.weight, bits.activation) > 8]
    assert wide
    for one in done.verified:
        assert set(one.floating) == {*wide, "patch_embed.proj", "head"}
        assert len(one.integer) == 8 - len(wide)
