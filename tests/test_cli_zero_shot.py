from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Outcome

import lampq
import lampq.cli
import lampq.inputs
from lampq.artifact.checkpoint import read_header
from lampq.data import Samples
from lampq.models import bundled_samples, load_model
from lampq.zero_shot import read_made

MADE = ["--images", "6", "--synthesis-steps", "2", "--synthesis-batch", "4"]
# no layer has the mean of four bits: some inputs have nine
QUICK = [
    *("--method", "psaq", "--bits", "4", "--act-bits", "8", "--choices", "3,5"),
    *("--fit-images", "6", "--metric-images", "4", "--score-images", "6", "--exchanges", "2"),
]


@pytest.fixture(scope="module", autouse=True)
def no_real_pictures() -> Iterator[None]:
    """Of the bundled pictures only some for the final score; calibration ones are an error."""

    def few(split: Any) -> Samples:
        assert split == "eval", "a zero-shot run has looked at calibration pictures"
        return bundled_samples(split).subset(60, 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lampq.inputs, "bundled_samples", few)
        yield


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six pictures that the command has made."""
    out = tmp_path_factory.mktemp("cli") / "pictures"
    found = Outcome("synthesize", "--out", out, "--images", 6, "--steps", 2, "--batch", 4)
    assert (found.code, found.err) == (0, "")
    assert found.out.startswith("6 pictures by pyramid, 3 of them plain; the model gives ")
    return out


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished zero-shot run."""
    out = tmp_path_factory.mktemp("cli") / "run"
    found = Outcome("quantize", "--zero-shot", "--out", out, "--quiet", *MADE, *QUICK)
    assert (found.code, found.out, found.err) == (0, "", "")
    return out


@pytest.fixture(scope="module")
def report(finished: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((finished / "report.json").read_text())
    return content


def test_synthesize_prints_its_record_as_json(tmp_path: Path) -> None:
    out = tmp_path / "pictures"
    options = ("--images", 2, "--steps", 1, "--recipe", "psaq", "--seed", 3, "--json")
    options += ("--precision", "float32")
    found = Outcome("synthesize", "fashion_swin", "--out", out, *options)
    assert (found.code, found.err) == (0, "")
    about = json.loads(found.out)
    assert about == json.loads((out / "synthesis.json").read_text())
    assert about["settings"] == {
        "images": 2,
        "recipe": "psaq",
        "steps": 1,
        "batch": 32,
        "seed": 3,
        "precision": "float32",
    }
    assert about["computed_in"] == "float32"


def test_a_run_without_images_scores_on_real_ones_only_at_the_end(report: dict[str, Any]) -> None:
    assert set(report["scores"]) == {"fp32", "uniform", "mixed"}
    assert all(score["images"] == 60 for score in report["scores"].values())
    assert report["data"]["calib"] == "None"
    assert report["data"]["calibration_images"] == 6


def test_the_report_says_how_the_pictures_were_made(report: dict[str, Any]) -> None:
    assert report["data"]["zero_shot"] == {
        "images": 6,
        "recipe": "pyramid",
        "steps": 2,
        "batch": 4,
        "seed": 0,
        "precision": "auto",
    }
    assert report["data"]["synthesis"]["model"]["name"] == "fashion_vit"
    assert report["config"]["images"] == 6


def test_weights_are_held_more_firmly_on_made_pictures_unless_asked_otherwise(
    report: dict[str, Any], pictures: Path, tmp_path: Path
) -> None:
    assert report["config"]["damping"] == 0.3
    assert report["config"]["block_contrast"] == 0.5
    out = tmp_path / "run"
    given = ("--zero-shot", "--synthetic", pictures, "--damping", 0.02)
    found = Outcome("quantize", *given, "--out", out, "--quiet", *QUICK)
    assert found.code == 0, found.err
    assert json.loads((out / "report.json").read_text())["config"]["damping"] == 0.02


def test_widths_keep_their_distance(report: dict[str, Any]) -> None:
    widths = report["plan"]["layers"].values()
    assert all(bits["activation"] == bits["weight"] + 4 for bits in widths)
    assert report["bits"]["mean_weight_searched"] <= 4


def test_the_pictures_of_a_run_are_those_of_the_command(finished: Path, pictures: Path) -> None:
    loaded = load_model("fashion_vit")
    one, other = (
        read_made(folder, loaded.source, loaded.preprocessing)
        for folder in (finished / "synthetic", pictures)
    )
    assert torch.equal(one.images, other.images)
    assert torch.equal(one.require_labels(""), other.require_labels(""))


def test_made_pictures_give_the_same_model_as_new_ones(
    finished: Path, pictures: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    arguments = ("--zero-shot", "--synthetic", pictures, "--images", 6)
    found = Outcome("quantize", "--out", out, "--quiet", *arguments, *QUICK)
    assert (found.code, found.err) == (0, "")
    same = [lampq.load(f / "model.safetensors").state_dict() for f in (out, finished)]
    assert all(torch.equal(same[0][key], same[1][key]) for key in same[1])
    report = json.loads((out / "report.json").read_text())
    assert report["data"]["zero_shot"] == {"synthetic": str(pictures)}


def test_an_interrupted_run_makes_its_pictures_further(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    arguments = ("quantize", "--zero-shot", "--out", out, "--quiet", *MADE, *QUICK)
    # after the first batch
    import lampq.artifact.states as states

    keep = states.StateFolder.save
    calls: list[str] = []

    def save(self: Any, key: str, tensors: Any) -> None:
        keep(self, key, tensors)
        calls.append(key)
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(states.StateFolder, "save", save)
    stopped = Outcome(*arguments)
    assert stopped.code == 130
    assert "continue with the same command and --resume" in stopped.err
    assert calls == ["batch 0"]
    again = Outcome(*arguments, "--resume")
    assert (again.code, again.err) == (0, "")
    assert calls == ["batch 0", "batch 1"]
    names = [f"images/{n:05d}.png" for n in range(6)]
    for name in names:
        parts = [folder / "synthetic" / name for folder in (out, finished)]
        assert parts[0].read_bytes() == parts[1].read_bytes()


WRONG = {
    "calib": (["--zero-shot", "--calib", "."], "takes no calibration pictures: leave --calib out"),
    "recipe": (["--zero-shot", "--recipe", "gan"], "unknown recipe 'gan'; known: psaq, pyramid"),
    "steps": (["--zero-shot", "--synthesis-steps", "0"], "steps must be at least 1, got 0"),
    "batch": (["--zero-shot", "--synthesis-batch", "0"], "batch must be at least 1, got 0"),
    "not-asked": (["--recipe", "psaq"], "give --zero-shot too"),
    "not-asked-folder": (["--synthetic", "."], "give --zero-shot too"),
    "both": (
        ["--zero-shot", "--synthetic", ".", "--recipe", "psaq"],
        "the pictures of --synthetic are made already",
    ),
    "no-pictures": (["--zero-shot", "--synthetic", "none"], "'none' holds no finished synthesis"),
    "weights": (
        ["vit_tiny_patch16_224", "--weights", "no.safetensors", "--zero-shot"],
        "no weights file 'no.safetensors'",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG)
def test_wrong_flags_are_one_sentence_and_exit_code_two(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    found = Outcome("quantize", "--out", tmp_path / "run", *arguments)
    assert found.code == 2
    assert message in found.err
    assert found.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


WRONG_SYNTHESIS = {
    "images": (["--images", "0"], "images must be at least 1, got 0"),
    "steps": (["--steps", "0"], "steps must be at least 1, got 0"),
    "seed": (["--seed", "-1"], "seed must be in"),
    "recipe": (["--recipe", "gan"], "unknown recipe 'gan'"),
    "precision": (["--precision", "half"], "precision must be one of auto, float32, bfloat16"),
    "model": (["no_such_model"], "unknown model 'no_such_model'"),
    "mean": (["--mean", "a"], "mean must be numbers"),
    "resume": (["--resume"], "holds no interrupted synthesis to resume"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG_SYNTHESIS.values(), ids=WRONG_SYNTHESIS)
def test_wrong_flags_of_synthesize_are_one_sentence_and_exit_code_two(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    found = Outcome("synthesize", "--out", tmp_path / "pictures", *arguments)
    assert found.code == 2
    assert message in found.err
    assert found.err.count("\n") == 1
    assert not (tmp_path / "pictures").exists()


def test_finished_pictures_are_never_overwritten(pictures: Path) -> None:
    found = Outcome("synthesize", "--out", pictures, "--images", 6, "--steps", 2)
    assert found.code == 2
    assert "already holds finished pictures" in found.err


def test_a_model_that_is_not_bundled_needs_pictures_or_zero_shot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model("fashion_vit")
    other = type(loaded)(loaded.model, type(loaded.source)("timm", "x", {}), loaded.preprocessing)
    monkeypatch.setattr(lampq.inputs, "load_model", lambda name, weights: other)
    found = Outcome("quantize", "x", "--out", tmp_path / "run")
    assert found.code == 2
    assert "give --calib DIR, or quantize it with --zero-shot" in found.err


VERIFIED = ("--images", "6", "--runtimes", "onnxruntime")


def test_an_export_is_verified_on_the_pictures_of_the_run(
    finished: Path, report: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "model.onnx"
    found = Outcome("export", finished, *VERIFIED, "--out", out, "--json")
    assert (found.code, found.err) == (0, "")
    (verified,) = json.loads(found.out)["verified"]
    assert verified["images"] == 6
    # inputs of nine bits are in float by design
    widths = report["plan"]["layers"]
    assert verified["floating"]
    assert verified["floating"] == [n for n, bits in widths.items() if bits["activation"] > 8]
    assert verified["integer"] == 26 - len(verified["floating"])
    assert out.is_file()


def test_other_pictures_may_be_given_for_an_export(
    finished: Path, pictures: Path, tmp_path: Path
) -> None:
    words = ("--calib", pictures, "--out", tmp_path / "model.onnx", "--quiet")
    found = Outcome("export", finished, *VERIFIED, *words)
    assert (found.code, found.err) == (0, "")


def test_pictures_that_are_gone_are_asked_for(finished: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    shutil.rmtree(run / "synthetic")
    found = Outcome("export", run, *VERIFIED)
    assert found.code == 2
    assert "the calibration pictures of the run are no longer in" in found.err
    assert found.err.count("\n") == 1


@pytest.fixture(scope="module")
def by_hand(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run at PSAQ-ViT's own sites, with a plan by hand: 4/8 bits everywhere."""
    out = tmp_path_factory.mktemp("cli") / "published"
    plan = json.loads((finished / "plan.json").read_text())
    plan["layers"] = {name: {"weight": 4, "activation": 8} for name in plan["layers"]}
    out.with_name("plan.json").write_text(json.dumps(plan))
    words = ("--synthetic", finished / "synthetic", "--plan", out.with_name("plan.json"))
    options = ("--method", "psaq", "--sites", "published", "--images", 6, "--bits", 4)
    found = Outcome("quantize", "--zero-shot", "--out", out, "--quiet", *words, *options)
    assert (found.code, found.out, found.err) == (0, "", "")
    return out


def sites_of(folder: Path) -> tuple[int, int, int]:
    """Numbers of quantized outputs, products and sums of a checkpoint."""
    header = read_header(folder / "model.safetensors").content
    outputs = sum("output_quantizer" in entry for entry in header["layers"].values())
    return outputs, len(header["matmuls"]), len(header.get("sums", {}))


def test_a_plan_of_made_pictures_is_fitted_again_for_speed(by_hand: Path, finished: Path) -> None:
    assert sites_of(by_hand) == (20, 12, 12)
    found = Outcome("export", by_hand, *VERIFIED, "--profile", "speed", "--quiet")
    assert (found.code, found.err) == (0, "")
    assert "26 layers on integer kernels, 0 in float by design" in found.out
    speed = by_hand / "speed"
    assert sites_of(speed) == (0, 0, 0)
    report = json.loads((speed / "report.json").read_text())
    assert report["config"]["profile"] == "speed"
    assert report["data"]["zero_shot"] == {"synthetic": str(finished / "synthetic")}
    assert report["data"]["synthesis"]["settings"]["images"] == 6
    assert report["data"]["calibration_images"] == 6
    # its own pictures are found again
    again = Outcome("export", speed, *VERIFIED, "--quiet")
    assert (again.code, again.err) == (0, "")


def test_a_plan_with_wide_layers_is_not_fitted_for_speed(finished: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    plan = json.loads((run / "plan.json").read_text())
    plan["layers"]["blocks.2.mlp.fc1"] = {"weight": 5, "activation": 9}
    (run / "plan.json").write_text(json.dumps(plan))
    before = sorted(path.name for path in run.iterdir())
    found = Outcome("export", run, *VERIFIED, "--profile", "speed")
    assert found.code == 2
    pattern = r"lampq: the plan has 5/9 bits for '\S+', and profile speed has at most 8\n"
    assert re.fullmatch(pattern, found.err)
    assert sorted(path.name for path in run.iterdir()) == before


def test_a_run_without_images_keeps_a_size_for_integer_kernels(
    finished: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    words = ("--zero-shot", "--synthetic", finished / "synthetic", "--images", 6)
    budget = ("--target-size", "240kB", "--profile", "speed")
    found = Outcome("quantize", "--out", out, "--quiet", *words, *budget, *QUICK)
    assert (found.code, found.err) == (0, "")
    assert (out / "model.safetensors").stat().st_size <= 240_000
    assert sites_of(out) == (0, 0, 0)
    plan = json.loads((out / "plan.json").read_text())["layers"].values()
    assert {bits["weight"] for bits in plan} <= {3, 4, 5}
    assert max(bits["activation"] for bits in plan) <= 8
