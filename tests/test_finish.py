"""Reconstruction as a stage of quantize() and of the command."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Case, Outcome, few_bundled
from torch import Tensor, nn

import lampq
import lampq.cli
import lampq.finish
from lampq.artifact.states import StateFolder
from lampq.data import Samples
from lampq.errors import ConfigError, DataError
from lampq.evaluate import predict
from lampq.pipeline import Result, quantize
from lampq.reconstruct import FINISHERS, Finish, Rates
from lampq.reconstruct.align import Align
from lampq.reconstruct.recipes import qdrop
from lampq.scoring import Run

OPTIONS: dict[str, Any] = {
    "bits": 2,
    "choices": [2, 3],
    "method": "minmax",
    "metric": "recon",
    "exchanges": 0,
    "iterations": 40,
    "lr_weights": 1e-3,
    "lr_scales": 3e-3,
    "lr_affine": 3e-3,
    "ridge": 100.0,  # so that something is left to train
}


@pytest.fixture(scope="module")
def samples(vit: Case) -> Samples:
    generator = torch.Generator().manual_seed(5)
    return Samples(torch.randn(40, *vit.samples.images.shape[1:], generator=generator))


@pytest.fixture(scope="module")
def done(vit: Case, samples: Samples) -> Result:
    return quantize(vit.original, samples, reconstruct="distill", **OPTIONS)


def test_it_brings_the_model_closer_on_images_that_it_has_not_seen(done: Result) -> None:
    outcome = done.reconstruction
    assert outcome is not None
    assert outcome.kept
    assert (outcome.name, outcome.images, outcome.held_out) == ("distill", 30, 10)
    assert outcome.after.agreement > outcome.before.agreement


def test_the_plan_and_the_size_stay(done: Result, tmp_path: Path) -> None:
    plain, trained = done.of_plan(done.plan), done.model
    one, other = plain.state_dict(), trained.state_dict()
    assert {key: value.shape for key, value in one.items()} == {
        key: value.shape for key, value in other.items()
    }
    assert any(not torch.equal(one[key], other[key]) for key in one if key.endswith("codes"))
    done.save(tmp_path / "m.safetensors")
    assert (tmp_path / "m.safetensors").stat().st_size > 0


def test_the_trained_model_reloads_bit_for_bit(
    vit: Case, done: Result, samples: Samples, tmp_path: Path
) -> None:
    done.save(tmp_path / "m.safetensors")
    loaded = lampq.load(tmp_path / "m.safetensors", model=vit.original)
    assert torch.equal(predict(loaded, samples), predict(done.model, samples))


def test_without_it_there_is_none(vit: Case, samples: Samples) -> None:
    assert quantize(vit.original, samples, **OPTIONS).reconstruction is None


def test_a_worse_model_is_not_returned(
    vit: Case, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(job: Finish) -> nn.Module:
        model = nn.Sequential(job.model, nn.Linear(10, 10))
        return model.eval()

    monkeypatch.setitem(FINISHERS._factories, "spoil", lambda: spoil)
    with pytest.warns(UserWarning, match="after spoil the divergence .* returned as it was"):
        result = quantize(vit.original, samples, reconstruct="spoil", **OPTIONS)
    assert result.reconstruction is not None
    assert not result.reconstruction.kept
    expected = predict(result.of_plan(result.plan), samples)
    assert torch.equal(predict(result.model, samples), expected)


def test_a_better_model_from_on_the_way_is_returned_and_kept_at_once(
    vit: Case, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[nn.Module] = []

    def stray(job: Finish) -> nn.Module:
        before = len(kept)
        job.offer(Align()(job))
        assert len(kept) == before + 1
        return nn.Sequential(job.model, nn.Linear(10, 10)).eval()

    monkeypatch.setitem(FINISHERS._factories, "stray", lambda: stray)
    run = Run(on_plan=lambda plan, model: kept.append(model))
    with pytest.warns(UserWarning, match="after stray the divergence .* on the way there it was"):
        result = quantize(vit.original, samples, run=run, reconstruct="stray", **OPTIONS)
    assert result.reconstruction is not None
    offered, last = result.reconstruction.stages
    assert result.reconstruction.kept
    assert result.reconstruction.after == offered
    assert offered.agreement > last.agreement
    assert torch.equal(predict(result.model, samples), predict(kept[-1], samples))


def test_distillation_offers_the_aligned_model(done: Result) -> None:
    assert done.reconstruction is not None
    assert len(done.reconstruction.stages) == 2


def test_an_unknown_name_is_refused_before_any_work(vit: Case, samples: Samples) -> None:
    with pytest.raises(
        ConfigError, match="unknown reconstruction 'x'; known: adalog, align, distill"
    ):
        quantize(vit.original, samples, reconstruct="x", **OPTIONS)


def test_a_single_image_is_refused(vit: Case, samples: Samples) -> None:
    one = Samples(samples.images[:1])
    with pytest.raises(DataError, match="needs at least two calibration images, got one"):
        quantize(vit.original, one, reconstruct="distill", **OPTIONS)


def test_stored_states_survive_and_damaged_ones_are_ignored(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path / "states")
    assert folder.load("block 0") is None
    tensors: Mapping[str, Tensor] = {"a": torch.arange(6.0).view(2, 3).T, "b": torch.tensor(3)}
    folder.save("block 0", tensors)
    stored = folder.load("block 0")
    assert stored is not None
    assert all(torch.equal(stored[key], tensors[key]) for key in tensors)
    (file,) = (tmp_path / "states").iterdir()
    file.write_bytes(file.read_bytes()[:-4])
    assert folder.load("block 0") is None


def test_an_interrupted_run_resumes_to_the_same_model(
    vit: Case, samples: Samples, tmp_path: Path, done: Result
) -> None:
    store = StateFolder(tmp_path)
    options = {**OPTIONS, "reconstruct": "distill"}
    first = quantize(vit.original, samples, config=None, run=Run(states=store), **options)
    again = quantize(vit.original, samples, config=None, run=Run(states=store), **options)
    for result in (first, again):
        assert torch.equal(predict(result.model, samples), predict(done.model, samples))


def test_given_rates_and_steps_replace_the_published_ones() -> None:
    assert qdrop(iterations=20_000).rates == Rates(1e-3, 4e-5, 0.0)
    assert qdrop(iterations=5_000).rates == Rates(2e-3, 8e-5, 0.0)
    assert qdrop(iterations=10).rates.weights == pytest.approx(1e-2)
    recipe = qdrop(iterations=7, lr_weights=0.5, lr_scales=0.25, lr_affine=0.125)
    assert (recipe.rates, recipe.iterations) == (Rates(0.5, 0.25, 0.125), 7)


@pytest.mark.parametrize(
    ("words", "name"),
    [(["--reconstruct"], "distill"), (["--reconstruct", "qdrop"], "qdrop"), ([], None)],
)
def test_the_command(tmp_path: Path, words: list[str], name: str | None) -> None:
    command = ["quantize", "fashion_vit", "--method", "minmax", "--metric", "recon"]
    command += ["--images", "32", "--exchanges", "0", "--iterations", "2", "--score-images", "8"]
    with few_bundled(40):
        ran = Outcome(*command, *words, "--quiet", "--out", tmp_path / "run")
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["config"]["reconstruct"] == name
    assert ("before_reconstruction" in report["scores"]) == (name is not None)
    found = report["reconstruction"]
    assert (None if found is None else found["name"]) == name
    assert (report["seconds"]["reconstruct"] > 0) == (name is not None)


def test_models_are_judged_on_held_out_images_and_their_mirror_images(
    vit: Case, samples: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Tensor] = []

    def watched(model: nn.Module, given: Samples) -> Tensor:
        seen.append(given.images)
        return predict(model, given)

    monkeypatch.setattr(lampq.finish, "predict", watched)
    quantize(vit.original, samples, reconstruct="align", **OPTIONS)
    assert len(seen) == 3  # the float model, the model as it was, the aligned one
    for images in seen:
        held, mirrored = images.chunk(2)
        assert len(held) == 10
        assert torch.equal(mirrored, held.flip(-1))
