from __future__ import annotations

import ast
import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from conftest import Case
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import lampq
from lampq.artifact.checkpoint import (
    FORMAT_VERSION,
    checkpoint_bytes,
    digest,
    load_checkpoint,
    read_checkpoint,
    write_atomically,
)
from lampq.calibrate import collect
from lampq.data import Samples
from lampq.errors import ConfigError, FormatError, LampqError
from lampq.graph.attention import explicit
from lampq.graph.discover import discover
from lampq.methods import METHODS, FitCache, SiteWidths
from lampq.models import ModelSource, source_of
from lampq.quant.modules import QuantLayer, assemble
from lampq.quant.token import TokenQuantizer
from lampq.types import BitPlan, LayerBits

USER = ModelSource("user", "Tiny", {})
Content = dict[str, Any]
Tensors = dict[str, Tensor]


def quantized(
    case: Case, method: str = "minmax", widths: tuple[int, ...] = (2, 3, 5), **options: object
) -> nn.Module:
    """The model of a case with layers of different widths."""
    sites = SiteWidths(LayerBits(8, 8), 4)
    fits = FitCache(case.model, case.graph, METHODS.get(method)(**options), case.stats, sites)
    bits = tuple(LayerBits(widths[i % len(widths)], 4) for i in range(len(case.graph.allocatable)))
    return assemble(case.model, *fits.of_plan(BitPlan(case.graph.allocatable, bits)))


@pytest.fixture
def written(vit: Case, tmp_path: Path) -> Path:
    """A checkpoint of the tiny ViT."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(checkpoint_bytes(quantized(vit), USER, {"plan": {}, "config": {}}))
    return path


def rewrite(path: Path, change: Callable[[Content, Tensors], None]) -> None:
    """Write the file again with its header and tensors changed, as lampq would."""
    with safe_open(path, framework="pt") as opened:
        content = json.loads(opened.metadata()["lampq"])
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    change(content, tensors)
    content["digest"] = digest(content, tensors)
    save_file(tensors, path, metadata={"lampq": json.dumps(content)})


@torch.no_grad()
def logits_of(model: nn.Module, images: Tensor) -> Tensor:
    return model(images)


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("widths", [(1, 2, 8), (3, 4, 5), (6, 7), (9, 10)], ids=str)
def test_loading_gives_equal_logits_bit_for_bit(
    case: Case, tmp_path: Path, method: str, widths: tuple[int, ...]
) -> None:
    model = quantized(case, method, widths)
    path = tmp_path / "model.safetensors"
    path.write_bytes(checkpoint_bytes(model, USER, {}))
    loaded = load_checkpoint(path, case.original)
    images = case.samples.images
    assert torch.equal(logits_of(loaded, images), logits_of(model, images))


@pytest.mark.parametrize(("ranges", "version"), [("static", 6), ("token", 7)])
def test_first_tokens_of_another_width_are_loaded_bit_for_bit_from_a_version_of_their_own(
    vit: Case, tmp_path: Path, ranges: str, version: int
) -> None:
    model = quantized(vit, "adalog", input_ranges=ranges, prefix_bits=8)
    path = tmp_path / "model.safetensors"
    path.write_bytes(checkpoint_bytes(model, USER, {}))
    content = read_checkpoint(path)[0].content
    assert content["format_version"] == version <= FORMAT_VERSION
    axis = {"axis": -1} if ranges == "token" else {}
    kind = "token" if ranges == "token" else "uniform"
    assert content["layers"]["blocks.0.attn.proj"]["input_quantizer"] == {
        "kind": "prefix",
        "bits": 4,
        "count": 1,
        "axis": -1,
        "prefix": {"kind": kind, "bits": 8, **axis},
        "body": {"kind": kind, "bits": 4, **axis},
    }
    loaded = load_checkpoint(path, vit.original)
    images = vit.samples.images
    assert torch.equal(logits_of(loaded, images), logits_of(model, images))
    assert checkpoint_bytes(loaded, USER, {}) == path.read_bytes()


def test_ranges_per_token_are_loaded_bit_for_bit_from_a_version_of_their_own(
    case: Case, tmp_path: Path
) -> None:
    model = quantized(case, "adalog", input_ranges="token")
    path = tmp_path / "model.safetensors"
    path.write_bytes(checkpoint_bytes(model, USER, {}))
    content = read_checkpoint(path)[0].content
    assert content["format_version"] == 7 == FORMAT_VERSION
    (proj,) = {
        json.dumps(entry["input_quantizer"])
        for entry in content["layers"].values()
        if entry["role"] == "proj"
    }
    assert json.loads(proj) == {"kind": "token", "bits": 4, "axis": -1}
    products = [entry for name, entry in content["matmuls"].items() if name.endswith("qk")]
    assert [entry["right"]["axis"] for entry in products] == [-2] * len(products)
    logs = [entry["input_quantizer"] for entry in content["layers"].values()]
    logs = [quantizer for quantizer in logs if quantizer and "step" in quantizer]
    logs += [entry["left"] for name, entry in content["matmuls"].items() if name.endswith("av")]
    assert {quantizer["kind"] for quantizer in logs} == {"token_log"}
    assert set(logs[0]) == {"kind", "bits", "axis", "step", "denominator", "table", "zero_code"}
    loaded = load_checkpoint(path, case.original)
    images = case.samples.images
    assert torch.equal(logits_of(loaded, images), logits_of(model, images))
    assert checkpoint_bytes(loaded, USER, {}) == path.read_bytes()


def test_evenly_spaced_ranges_per_token_need_no_newer_version(vit: Case) -> None:
    model = quantized(vit, "minmax")
    layer = model.get_submodule("blocks.0.attn.proj")
    layer.input_quantizer = TokenQuantizer(4, torch.tensor(0.8))
    assert b'\\"format_version\\":5' in checkpoint_bytes(model, USER, {})


def test_static_ranges_need_no_new_version(vit: Case) -> None:
    content = checkpoint_bytes(quantized(vit, "adalog"), USER, {})
    assert b'\\"format_version\\":2' in content


def test_a_loaded_model_is_saved_to_the_same_bytes(case: Case, tmp_path: Path) -> None:
    content = checkpoint_bytes(quantized(case, "adalog"), USER, {"plan": {}})
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    loaded = load_checkpoint(path, case.original)
    assert checkpoint_bytes(loaded, USER, {"plan": {}}) == content


def test_the_float_model_given_to_load_is_not_changed(vit: Case, written: Path) -> None:
    before = {key: value.clone() for key, value in vit.original.state_dict().items()}
    modules = dict(vit.original.named_modules())
    load_checkpoint(written, vit.original)
    assert dict(vit.original.named_modules()) == modules
    assert all(torch.equal(vit.original.state_dict()[k], v) for k, v in before.items())


def test_weights_of_the_given_model_do_not_matter(vit: Case, written: Path) -> None:
    other = explicit(vit.original)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(0.123)
    images = vit.samples.images
    expected = logits_of(load_checkpoint(written, vit.original), images)
    assert torch.equal(logits_of(load_checkpoint(written, other), images), expected)


TIMM = [
    pytest.param("test_vit", {"img_size": 32, "num_classes": 10}, id="vit"),
    pytest.param("test_vit", {"img_size": (32, 48), "num_classes": 3}, id="vit-oblong"),
    pytest.param("deit_tiny_patch16_224", {"img_size": 32}, id="deit"),
    pytest.param(
        "swin_tiny_patch4_window7_224",
        {"img_size": 56, "num_classes": 10},
        id="swin",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("name", "options"), TIMM)
def test_a_timm_model_is_loaded_by_its_file_alone(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = timm.create_model(name, **options).eval()
    size = options["img_size"]
    height, width = size if isinstance(size, tuple) else (size, size)
    samples = Samples(torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1)))
    opened = explicit(model)
    graph = discover(opened)
    fits = FitCache(
        opened,
        graph,
        METHODS.get("minmax")(),
        collect(opened, graph, samples),
        SiteWidths(LayerBits(8, 8), 4),
    )
    plan = BitPlan.uniform(graph.allocatable, LayerBits(4, 4))
    small = assemble(opened, *fits.of_plan(plan))
    path = tmp_path / "model.safetensors"
    path.write_bytes(checkpoint_bytes(small, source_of(model), {}))
    expected = logits_of(small, samples.images)
    assert torch.equal(logits_of(lampq.load(path), samples.images), expected)


def test_a_model_lampq_cannot_build_is_asked_for(written: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds a Tiny.*give the float model.*model="):
        load_checkpoint(written)


@pytest.mark.parametrize("method", list(METHODS))
def test_the_file_is_hardly_larger_than_its_codes_and_what_stays_in_float(
    case: Case, method: str
) -> None:
    model = quantized(case, method)
    content = checkpoint_bytes(model, USER, {})
    header = 8 + int.from_bytes(content[:8], "little")
    layers = [module for module in model.modules() if isinstance(module, QuantLayer)]
    codes = sum(layer.codes.numel() * layer.bits.weight for layer in layers) / 8
    floats = 4 * (sum(p.numel() for p in model.parameters()) + sum(m.bias.numel() for m in layers))
    scales = 4 * sum(
        buffer.numel()
        for name, buffer in model.named_buffers()
        if "_quantizer." in name or ".left." in name or ".right." in name
    )
    assert len(content) <= 1.02 * codes + floats + scales + header + 8


def test_whole_zero_points_take_one_byte(vit: Case, written: Path) -> None:
    _, tensors = read_checkpoint(written)
    zero = tensors["blocks.0.attn.qkv.weight_quantizer.zero"]
    assert zero.dtype == torch.uint8
    loaded = load_checkpoint(written, vit.original)
    layer = loaded.get_submodule("blocks.0.attn.qkv")
    assert torch.equal(layer.weight_quantizer.zero, zero.float())


def test_the_header_says_what_is_inside(vit: Case, written: Path) -> None:
    header, tensors = read_checkpoint(written)
    assert header.content["format_version"] == 2 <= FORMAT_VERSION
    assert header.content["lampq_version"] == lampq.__version__
    assert header.source == USER
    listed = dict(header.layers())
    assert [spec.name for spec in listed] == [layer.name for layer in vit.graph.layers]
    for spec, bits in listed.items():
        original = vit.graph.layer(spec.name)
        assert (spec.role, spec.block, spec.n_params) == (
            original.role,
            original.block,
            original.n_params,
        )
        assert tensors[f"{spec.name}.codes"].numel() == -(-spec.n_params * bits.weight // 8)


def test_a_newer_format_version_is_refused_by_message(written: Path) -> None:
    rewrite(written, lambda content, _: content.update(format_version=FORMAT_VERSION + 1))
    expected = f"format version {FORMAT_VERSION + 1}, this lampq reads up to {FORMAT_VERSION}"
    with pytest.raises(FormatError, match=f"{expected}: install a newer lampq"):
        load_checkpoint(written)


@pytest.mark.parametrize("version", [0, -3])
def test_a_version_that_never_was_is_refused(written: Path, version: int) -> None:
    rewrite(written, lambda content, _: content.update(format_version=version))
    with pytest.raises(FormatError, match=f"format version {version}, which does not exist"):
        load_checkpoint(written)


def test_a_file_of_the_first_version_needs_no_digest(vit: Case, written: Path) -> None:
    expected = logits_of(load_checkpoint(written, vit.original), vit.samples.images)
    with safe_open(written, framework="pt") as opened:
        content = json.loads(opened.metadata()["lampq"])
        tensors = {key: opened.get_tensor(key).clone() for key in opened.keys()}  # noqa: SIM118
    del content["digest"]
    content["format_version"] = 1
    save_file(tensors, written, metadata={"lampq": json.dumps(content)})
    loaded = load_checkpoint(written, vit.original)
    assert torch.equal(logits_of(loaded, vit.samples.images), expected)


@pytest.mark.parametrize("place", [-1, -400, -4000], ids=str)
def test_a_changed_byte_is_noticed(vit: Case, written: Path, place: int) -> None:
    content = bytearray(written.read_bytes())
    content[place] ^= 1
    written.write_bytes(bytes(content))
    with pytest.raises(FormatError, match="was changed after lampq wrote it, or is damaged"):
        load_checkpoint(written, vit.original)


def test_a_changed_header_is_noticed(vit: Case, written: Path) -> None:
    content = written.read_bytes()
    assert b'\\"role\\":\\"qkv\\"' in content
    written.write_bytes(content.replace(b'\\"role\\":\\"qkv\\"', b'\\"role\\":\\"fc1\\"', 1))
    with pytest.raises(FormatError, match="was changed after lampq wrote it"):
        load_checkpoint(written, vit.original)


@pytest.mark.parametrize("keep", [0, 5, 8, 200, -1], ids=str)
def test_a_truncated_file_is_refused(vit: Case, written: Path, keep: int) -> None:
    written.write_bytes(written.read_bytes()[:keep])
    with pytest.raises(FormatError, match=r"model\.safetensors' is damaged or no safetensors file"):
        load_checkpoint(written, vit.original)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a model, but some text that is long enough to look like a header")
    with pytest.raises(FormatError, match="is damaged or no safetensors file"):
        load_checkpoint(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"no checkpoint .*none\.safetensors"):
        load_checkpoint(tmp_path / "none.safetensors")


def test_plain_float_weights_are_told_from_a_checkpoint(vit: Case, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(vit.original.state_dict(), path)
    with pytest.raises(FormatError, match="no lampq checkpoint; float weights go with --weights"):
        load_checkpoint(path)


QKV = "blocks.0.attn.qkv"


def _layer(**fields: Any) -> Callable[[Content, Tensors], None]:
    return lambda content, _: content["layers"][QKV].update(fields)


def _renamed(content: Content, _tensors: Tensors) -> None:
    content["layers"]["blocks.7.attn.qkv"] = content["layers"].pop(QKV)


def _decoded_by_token(content: Content, tensors: Tensors) -> None:
    content["layers"][QKV]["weight_quantizer"] = {"kind": "token", "bits": 2, "axis": -1}
    for key in [key for key in tensors if key.startswith(f"{QKV}.weight_quantizer.")]:
        del tensors[key]
    tensors[f"{QKV}.weight_quantizer.clip"] = torch.tensor(1.0)


HEADERS: dict[str, Callable[[Content, Tensors], object]] = {
    "no-version": lambda c, _: c.pop("format_version"),
    "version-text": lambda c, _: c.update(format_version="new"),
    "no-layers": lambda c, _: c.pop("layers"),
    "layers-list": lambda c, _: c.update(layers=[1, 2]),
    "no-matmuls": lambda c, _: c.pop("matmuls"),
    "unknown-layer": _renamed,
    "a-norm-as-layer": lambda c, _: c["layers"].update({"norm": c["layers"].pop(QKV)}),
    "unknown-role": _layer(role="value"),
    "other-width": _layer(bits=[7, 4]),
    "impossible-width": _layer(bits=[9, 4]),
    "other-shape": _layer(shape=[10, 24]),
    "turned-shape": _layer(shape=[24, 72]),
    "flat-shape": _layer(shape=[1728]),
    "shape-text": _layer(shape="72x24"),
    "unknown-quantizer": _layer(weight_quantizer={"kind": "cubic", "bits": 2}),
    "quantizer-without-bits": _layer(weight_quantizer={"kind": "uniform"}),
    "weight-per-token": _decoded_by_token,
    "token-on-another-axis": _layer(input_quantizer={"kind": "token", "bits": 4, "axis": 0}),
    "no-quantizer": lambda c, _: c["layers"][QKV].pop("weight_quantizer"),
}


@pytest.mark.parametrize("change", HEADERS.values(), ids=HEADERS)
def test_a_tampered_header_is_refused_in_one_sentence(
    vit: Case, written: Path, change: Callable[[Content, Tensors], None]
) -> None:
    rewrite(written, change)
    with pytest.raises(FormatError, match=r"^[^\n]{20,}[^.\n]$"):
        load_checkpoint(written, vit.original)


SOURCE_FIELDS: dict[str, Callable[[Content, Tensors], object]] = {
    "none": lambda c, _: c.pop("source"),
    "text": lambda c, _: c.update(source="timm"),
    "no-name": lambda c, _: c["source"].pop("name"),
    "unknown-kind": lambda c, _: c["source"].update(kind="other"),
    "options-list": lambda c, _: c["source"].update(options=[1]),
}


@pytest.mark.parametrize("change", SOURCE_FIELDS.values(), ids=SOURCE_FIELDS)
def test_a_tampered_source_is_refused_in_one_sentence(
    written: Path, change: Callable[[Content, Tensors], None]
) -> None:
    rewrite(written, change)
    with pytest.raises(LampqError, match=r"^[^\n]{20,}[^.\n]$"):
        load_checkpoint(written)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "null"], ids=repr)
def test_a_header_that_is_no_object_is_refused(vit: Case, written: Path, text: str) -> None:
    with safe_open(written, framework="pt") as opened:
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    save_file(tensors, written, metadata={"lampq": text})
    with pytest.raises(FormatError, match="header"):
        load_checkpoint(written, vit.original)


SCALE = f"{QKV}.weight_quantizer.scale"
TENSORS: dict[str, Callable[[Content, Tensors], object]] = {
    "codes-missing": lambda _, t: t.pop(f"{QKV}.codes"),
    "codes-short": lambda _, t: t.update({f"{QKV}.codes": t[f"{QKV}.codes"][:-1].clone()}),
    "bias-missing": lambda _, t: t.pop(f"{QKV}.bias"),
    "bias-short": lambda _, t: t.update({f"{QKV}.bias": torch.zeros(3)}),
    "bias-nan": lambda _, t: t[f"{QKV}.bias"].fill_(float("nan")),
    "scale-missing": lambda _, t: t.pop(SCALE),
    "scale-short": lambda _, t: t.update({SCALE: torch.ones(5, 1)}),
    "scale-nan": lambda _, t: t[SCALE].fill_(float("nan")),
    "norm-missing": lambda _, t: t.pop("norm.weight"),
    "norm-short": lambda _, t: t.update({"norm.weight": torch.ones(5)}),
    "norm-infinite": lambda _, t: t["norm.weight"].fill_(float("inf")),
    "extra-tensor": lambda _, t: t.update({"other": torch.ones(5)}),
    "extra-buffer": lambda _, t: t.update({f"{QKV}.weight_quantizer.more": torch.ones(5)}),
}


@pytest.mark.parametrize("change", TENSORS.values(), ids=TENSORS)
def test_loading_is_strict_about_tensors(
    vit: Case, written: Path, change: Callable[[Content, Tensors], None]
) -> None:
    rewrite(written, change)
    with pytest.raises(FormatError, match=r"model\.safetensors|quantizer|codes of|the bias of"):
        load_checkpoint(written, vit.original)


def test_a_checkpoint_of_another_architecture_is_refused(swin: Case, written: Path) -> None:
    with pytest.raises(FormatError, match="does not fit the model 'Tiny'"):
        load_checkpoint(written, swin.original)


def test_a_file_is_written_with_its_folders(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    write_atomically(path, b"content")
    assert path.read_bytes() == b"content"
    assert [p.name for p in path.parent.iterdir()] == ["file"]


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old and longer")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_written_file_has_the_usual_rights(tmp_path: Path) -> None:
    usual, path = tmp_path / "usual", tmp_path / "file"
    usual.write_bytes(b"")
    write_atomically(path, b"")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(usual.stat().st_mode)


@pytest.mark.parametrize("old", [None, b"old"], ids=["new-file", "old-file"])
def test_a_full_disk_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bytes | None
) -> None:
    path = tmp_path / "file"
    if old is not None:
        path.write_bytes(old)

    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LampqError, match=r"cannot write .*file': No space left on device"):
        write_atomically(path, b"new")
    assert [p.name for p in tmp_path.iterdir()] == ([] if old is None else ["file"])
    assert old is None or path.read_bytes() == old


def test_an_interruption_while_writing_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def interrupt(_handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"old"


def test_a_folder_in_the_place_of_the_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(LampqError, match="cannot write"):
        write_atomically(tmp_path / "file", b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


SOURCES = sorted(Path(lampq.__file__).parent.rglob("*.py"))
UNSAFE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_file_of_the_package_unpickles(path: Path) -> None:
    safe = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False)}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & UNSAFE
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in UNSAFE
        if isinstance(node, ast.Call) and ast.unparse(node.func) in safe:
            name, wanted = safe[ast.unparse(node.func)]
            given = {
                word.arg: ast.literal_eval(word.value) for word in node.keywords if word.arg == name
            }
            assert given == {name: wanted}
