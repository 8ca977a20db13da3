"""One callable with one signature in every runtime, built from the packed file alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Case, fits_of
from torch import nn

import lampq
import lampq.runtime
from lampq.artifact.checkpoint import checkpoint_bytes
from lampq.artifact.onnx import onnx_model
from lampq.artifact.onnx.file import onnx_bytes
from lampq.errors import (
    ConfigError,
    DataError,
    ExportError,
    FormatError,
    LampqError,
    MissingDependencyError,
)
from lampq.models import ModelSource
from lampq.quant.modules import assemble
from lampq.runtime import RUNTIMES, SESSIONS, overflows
from lampq.runtime.ort import OnnxRuntimeSession

ENGINES = list(SESSIONS)
USER = ModelSource("user", "Tiny", {})


@pytest.fixture(scope="module")
def packed(vit: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the tiny ViT at eight bits."""
    path = tmp_path_factory.mktemp("packed") / "model.safetensors"
    model = assemble(vit.model, *fits_of(vit, "minmax", 8))
    path.write_bytes(checkpoint_bytes(model, USER, {}))
    return path


@pytest.fixture
def exported(vit: Case, packed: Path, tmp_path: Path) -> Path:
    """The same as an ONNX file."""
    path = tmp_path / "model.onnx"
    model = lampq.load(packed, vit.original)
    path.write_bytes(onnx_bytes(onnx_model(model), {}))
    return path


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_packed_file_gives_the_same_logits_in_every_runtime(
    vit: Case, packed: Path, runtime: str
) -> None:
    expected = lampq.load(packed, vit.original)(vit.samples.images)
    model = lampq.load(packed, vit.original, runtime=runtime)
    for count in (1, 6, 1):
        logits = model(vit.samples.images[:count])
        assert isinstance(logits, torch.Tensor)
        assert logits.dtype == torch.float32
        # a value may cross the border between two of 256 codes
        worst = float((logits - expected[:count]).abs().max())
        assert worst < 0.05 * float(expected.std())


@pytest.mark.parametrize("runtime", ENGINES)
@pytest.mark.parametrize(("method", "bits"), [("psaq", 8), ("psaq", 10), ("minmax", 9)])
def test_quantized_outputs_and_sums_and_wide_layers_are_deployed(
    vit: Case, tmp_path: Path, method: str, bits: int, runtime: str
) -> None:
    path = tmp_path / "model.safetensors"
    model = assemble(vit.model, *fits_of(vit, method, bits))
    path.write_bytes(checkpoint_bytes(model, USER, {}))
    expected = model(vit.samples.images)
    logits = lampq.load(path, vit.original, runtime=runtime)(vit.samples.images)
    worst = float((logits - expected).abs().max())
    assert worst < 0.05 * float(expected.std())
    if method == "psaq":
        # its last quantizer is that of the logits
        grid = model.get_submodule("head").output_quantizer
        torch.testing.assert_close(grid(logits.clone()), logits)


def test_torch_gives_a_module(vit: Case, packed: Path) -> None:
    assert isinstance(lampq.load(packed, vit.original, runtime="torch"), nn.Module)


@pytest.mark.parametrize("runtime", ENGINES)
def test_an_onnx_file_is_loaded_too(vit: Case, exported: Path, runtime: str) -> None:
    session = lampq.load(exported, runtime=runtime)
    assert session(vit.samples.images).shape == (6, 10)


def test_an_onnx_file_is_not_for_torch(exported: Path) -> None:
    with pytest.raises(ConfigError, match="is an ONNX file, which torch does not run"):
        lampq.load(exported)


def test_threads_are_for_runtimes_that_have_their_own(vit: Case, packed: Path) -> None:
    for runtime in ENGINES:
        session = lampq.load(packed, vit.original, runtime=runtime, threads=1)
        assert session(vit.samples.images[:1]).shape == (1, 10)
    with pytest.raises(ConfigError, match=r"leave threads out, and call torch\.set_num_threads"):
        lampq.load(packed, vit.original, runtime="torch", threads=1)


def test_an_unknown_runtime_is_told(packed: Path) -> None:
    with pytest.raises(ConfigError, match="unknown runtime 'tvm'; known: torch, onnxruntime, open"):
        lampq.load(packed, runtime="tvm")


@pytest.mark.parametrize(
    ("package", "runtime", "extra"),
    [
        ("onnxruntime", "onnxruntime", "onnx"),
        ("openvino", "openvino", "openvino"),
        ("onnx", "onnxruntime", "onnx"),
    ],
)
def test_a_missing_package_is_one_sentence_with_the_command(
    vit: Case,
    packed: Path,
    monkeypatch: pytest.MonkeyPatch,
    package: str,
    runtime: str,
    extra: str,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    expected = rf"^[^\n]*{package}[^\n]*: pip install 'lampq\[{extra}\]'$"
    with pytest.raises(MissingDependencyError, match=expected):
        lampq.load(packed, vit.original, runtime=runtime)


@pytest.mark.parametrize("runtime", ENGINES)
@pytest.mark.parametrize(
    "shape", [(2, 3, 16, 32), (2, 1, 32, 32), (3, 32, 32), (0, 3, 32, 32)], ids=str
)
def test_images_of_another_shape_are_refused(
    exported: Path, runtime: str, shape: tuple[int, ...]
) -> None:
    session = lampq.load(exported, runtime=runtime)
    with pytest.raises(DataError, match=r"one or more images of shape \(3, 32, 32\), got a ten"):
        session(torch.zeros(shape))


@pytest.mark.parametrize("runtime", ENGINES)
def test_a_graph_that_the_runtime_rejects_is_one_sentence(runtime: str) -> None:
    with pytest.raises(ExportError, match=rf"^{runtime} rejects the graph: [^\n]+$"):
        SESSIONS[runtime](b"\x08\x08nonsense")


@pytest.mark.parametrize("keep", [0, 10, 5000, -1], ids=str)
def test_a_truncated_onnx_file_is_refused(exported: Path, keep: int) -> None:
    exported.write_bytes(exported.read_bytes()[:keep])
    with pytest.raises(FormatError, match=r"^[^\n]*model\.onnx' is damaged"):
        lampq.load(exported, runtime="onnxruntime")


def test_a_changed_weight_of_an_onnx_file_is_noticed(exported: Path) -> None:
    import onnx

    model = onnx.load(exported)
    weight = next(t for t in model.graph.initializer if t.name == "blocks.0.attn.qkv.weight")
    weight.raw_data = bytes([weight.raw_data[0] ^ 1]) + weight.raw_data[1:]
    onnx.save(model, exported)
    with pytest.raises(FormatError, match="was changed after lampq wrote it"):
        lampq.load(exported, runtime="onnxruntime")


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"format_version": 7}, "has format version 7, this lampq reads 1"),
        ({"format_version": "new"}, "has format version 'new', this lampq reads 1"),
    ],
)
def test_an_onnx_file_of_an_unknown_version_is_refused(
    vit: Case, packed: Path, tmp_path: Path, about: dict[str, Any], message: str
) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(onnx_bytes(onnx_model(lampq.load(packed, vit.original)), about))
    with pytest.raises(FormatError, match=message):
        lampq.load(path, runtime="onnxruntime")


def test_an_onnx_file_of_someone_else_is_refused(vit: Case, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(onnx_model(vit.model).SerializeToString())
    with pytest.raises(LampqError, match="an ONNX file that lampq did not write"):
        lampq.load(path, runtime="onnxruntime")


def test_a_missing_onnx_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"no ONNX file .*none\.onnx"):
        lampq.load(tmp_path / "none.onnx", runtime="onnxruntime")


def test_onnxruntime_takes_images_one_by_one(exported: Path, vit: Case) -> None:
    content = exported.read_bytes()
    one, all_six = OnnxRuntimeSession(content), OnnxRuntimeSession(content, micro_batch=6)
    seen: list[int] = []
    inner = one._session

    class Watched:
        def run(self, outputs: None, feeds: dict[str, Any]) -> Any:
            seen.extend(len(values) for values in feeds.values())
            return inner.run(outputs, feeds)

    one._session = Watched()
    np.testing.assert_allclose(
        one(vit.samples.images), all_six(vit.samples.images), rtol=1e-4, atol=1e-4
    )
    assert seen == [1] * 6


@pytest.mark.parametrize("runtime", ENGINES)
def test_a_split_weight_is_right_where_the_processor_overflows(
    runtime: str, monkeypatch: pytest.MonkeyPatch, vit: Case, packed: Path
) -> None:
    graphs: list[bool] = []
    original = lampq.runtime.onnx_model

    def watched(model: nn.Module, *, any_cpu: bool) -> Any:
        graphs.append(any_cpu)
        return original(model, any_cpu=any_cpu)

    monkeypatch.setattr(lampq.runtime, "onnx_model", watched)
    lampq.load(packed, vit.original, runtime=runtime)
    assert graphs == [overflows(runtime)]
