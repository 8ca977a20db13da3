from __future__ import annotations

import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from conftest import Case
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lampq.errors import ConfigError, FormatError
from lampq.evaluate import predict
from lampq.models import (
    BUNDLED,
    DEFAULT_MODEL,
    ModelSource,
    bundled_samples,
    check_finite,
    load_model,
    load_state,
    preprocessing_of,
    read_weights,
    source_of,
    tag,
)

bundled = pytest.mark.parametrize("name", BUNDLED)


def made(name: str, **options: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return timm.create_model(name, **options).eval()


@pytest.fixture
def state() -> dict[str, Tensor]:
    """Weights of timm's small test ViT with seven classes."""
    return made("test_vit", num_classes=7).state_dict()


@bundled
def test_a_bundled_model_gives_finite_logits_for_bundled_pictures(name: str) -> None:
    loaded = load_model(name)
    samples = bundled_samples("eval").subset(8, 0)
    logits = predict(loaded.model, samples)
    assert logits.shape == (8, 10)
    assert bool(torch.isfinite(logits).all())
    assert not loaded.model.training


@bundled
def test_a_bundled_model_is_built_again_from_its_source(name: str) -> None:
    loaded = load_model(name)
    assert loaded.source == ModelSource("bundled", name, {})
    rebuilt = loaded.source.build().state_dict()
    own = loaded.model.state_dict()
    assert {k: v.shape for k, v in rebuilt.items()} == {k: v.shape for k, v in own.items()}


@bundled
def test_a_bundled_model_takes_other_weights(name: str, tmp_path: Path) -> None:
    state = {key: torch.zeros_like(t) for key, t in load_model(name).model.state_dict().items()}
    save_file(state, tmp_path / "w.safetensors")
    loaded = load_model(name, tmp_path / "w.safetensors")
    assert all(not bool(p.any()) for p in loaded.model.parameters())


@pytest.mark.parametrize(("name", "least"), [("fashion_vit", 91.0), ("fashion_swin", 90.0)])
def test_the_bundled_weights_record_a_test_accuracy_worth_bundling(name: str, least: float) -> None:
    path = Path(str(files("lampq") / "bundled" / f"{name}.safetensors"))
    with safe_open(path, framework="pt") as opened:
        metadata = opened.metadata() or {}
    assert "test_top1" in metadata
    assert float(metadata["test_top1"]) >= least


@pytest.mark.parametrize(("split", "count"), [("calib", 1024), ("eval", 2000)])
def test_bundled_pictures_are_of_the_stated_number_and_kind(split: str, count: int) -> None:
    samples = bundled_samples(split)  # type: ignore[arg-type]
    assert samples.images.shape == (count, 1, 28, 28)
    assert samples.images.dtype == torch.uint8
    labels = samples.require_labels("a test")
    assert labels.dtype == torch.int64
    assert labels.bincount().min() > 0
    assert len(labels.bincount()) == 10


def test_no_bundled_picture_is_in_both_splits() -> None:
    calib, scored = (bundled_samples(split).images.flatten(1) for split in ("calib", "eval"))  # type: ignore[arg-type]
    shared = {bytes(x.numpy()) for x in calib} & {bytes(x.numpy()) for x in scored}
    assert not shared


def test_the_default_model_is_bundled() -> None:
    assert DEFAULT_MODEL in BUNDLED


def test_a_timm_model_is_loaded_with_local_weights(
    tmp_path: Path, state: dict[str, Tensor]
) -> None:
    save_file(state, tmp_path / "w.safetensors")
    loaded = load_model("test_vit", tmp_path / "w.safetensors")
    assert loaded.source == ModelSource("timm", "test_vit", {"num_classes": 7})
    own = loaded.model.state_dict()
    assert all(torch.equal(own[key], value) for key, value in state.items())
    assert source_of(loaded.model) == loaded.source
    assert loaded.preprocessing.size == 160


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {"model": state},
        lambda state: {"state_dict": {f"module.{k}": v for k, v in state.items()}},
    ],
    ids=["bare", "state_dict", "model", "data-parallel"],
)
def test_a_pth_file_is_read_in_the_usual_wrappings(
    tmp_path: Path, state: dict[str, Tensor], wrap: Callable[[Any], Any]
) -> None:
    torch.save(wrap(state), tmp_path / "w.pth")
    found = read_weights(tmp_path / "w.pth")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[key], value) for key, value in state.items())


class Harmful:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return Path.touch, (Path("harmed"),)


def test_a_pth_file_cannot_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": Harmful()}, tmp_path / "w.pth")
    with pytest.raises(FormatError, match="cannot read weights from"):
        read_weights(tmp_path / "w.pth")
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("name", ["w.pth", "w.safetensors"])
def test_a_damaged_weights_file_is_named_in_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"nothing of the kind")
    with pytest.raises(FormatError, match=r"^cannot read weights from '[^\n]*$"):
        read_weights(tmp_path / name)


def test_a_weights_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no weights file .*none\.pth"):
        read_weights(tmp_path / "none.pth")


@pytest.mark.parametrize("content", [[1, 2], {"epoch": 3}, 5], ids=str)
def test_a_pth_file_without_a_state_dict_is_refused(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(FormatError, match="holds no state dict"):
        read_weights(tmp_path / "w.pth")


WRONG_STATES: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (lambda s: s.pop("norm.weight"), "tensor 'norm.weight' of the model is missing"),
    "extra": (lambda s: s.update(more=torch.ones(1)), "tensor 'more' is not in the model"),
    "shape": (
        lambda s: s.update({"norm.weight": torch.ones(3)}),
        r"tensor 'norm\.weight' has shape \(3,\), the model needs \(64,\)",
    ),
    "nan": (lambda s: s["norm.weight"].fill_(float("nan")), "'norm.weight' contains NaN"),
    "infinite": (lambda s: s["head.bias"].fill_(float("inf")), "'head.bias' contains NaN or inf"),
}


@pytest.mark.parametrize(("change", "message"), WRONG_STATES.values(), ids=WRONG_STATES)
def test_weights_that_do_not_fit_are_named(
    state: dict[str, Tensor], change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    model = made("test_vit", num_classes=7)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    given = {key: value.clone() for key, value in state.items()}
    change(given)
    with pytest.raises(FormatError, match=f"somewhere: .*{message}"):
        load_state(model, given, "somewhere")
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())


def test_an_unknown_model_is_refused_with_names_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"unknown model 'vit_tiny_patch61'; bundled: .*; near: "):
        load_model("vit_tiny_patch61", None)


def test_a_parameter_that_is_not_finite_is_named() -> None:
    model = made("test_vit", img_size=32)
    check_finite(model)
    with torch.no_grad():
        model.blocks[1].mlp.fc1.weight[0, 0] = float("nan")
    with pytest.raises(FormatError, match=r"parameter 'blocks\.1\.mlp\.fc1\.weight' contains NaN"):
        check_finite(model)


def test_a_model_made_by_timm_is_recognised() -> None:
    found = source_of(made("test_vit", img_size=32, num_classes=10))
    assert (found.kind, found.name) == ("timm", "test_vit")
    assert found.options["num_classes"] == 10
    assert tuple(found.options["img_size"]) == (32, 32)


def test_a_source_survives_json() -> None:
    found = source_of(made("test_vit", img_size=32, num_classes=10))
    fields = json.loads(json.dumps(found.to_json()))
    rebuilt = ModelSource(**fields).build()
    assert rebuilt(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


def test_a_remembered_source_is_returned() -> None:
    source = ModelSource("timm", "anything", {"a": 1})
    assert source_of(tag(nn.Linear(2, 2), source)) is source


def test_a_class_of_ones_own_is_the_users(vit: Case) -> None:
    assert source_of(vit.original) == ModelSource("user", "VisionTransformer", {})
    assert source_of(nn.Linear(2, 2)) == ModelSource("user", "Linear", {})


OTHERS: dict[str, dict[str, Any]] = {
    "depth": {"depth": 2},
    "width": {"embed_dim": 32},
    "class-token": {"class_token": False, "global_pool": "avg"},
    "heads": {"num_heads": 4},
    "activation": {"act_layer": nn.ReLU},
}


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
def test_a_source_that_timm_builds_computes_the_same(options: dict[str, Any]) -> None:
    model = made("test_vit", img_size=32, **options)
    source = source_of(model)
    if source.kind == "timm":
        rebuilt = source.build()
        rebuilt.load_state_dict(model.state_dict())
        images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            torch.testing.assert_close(rebuilt(images), model(images))


def test_the_users_own_model_cannot_be_built() -> None:
    with pytest.raises(ConfigError, match=r"holds a Mine, .*lampq\.load\(path, model=\.\.\.\)"):
        ModelSource("user", "Mine", {}).build()


def test_preprocessing_is_what_timm_says_of_the_model() -> None:
    model = made("vit_tiny_patch16_224", img_size=32)
    how = preprocessing_of(model)
    assert how.mean == (0.5, 0.5, 0.5)
    assert how.std == (0.5, 0.5, 0.5)
    assert how.crop_pct == 0.9
