"""Deployed models: the packed file, or an ONNX file, in torch, ONNX Runtime or OpenVINO."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from torch import Tensor, nn

from lampq.artifact.checkpoint import load_checkpoint
from lampq.artifact.onnx import GraphBuilder, onnx_model
from lampq.artifact.onnx.file import read_onnx
from lampq.errors import ConfigError
from lampq.runtime.base import Session
from lampq.runtime.ort import OnnxRuntimeSession
from lampq.runtime.ort import require as require_onnxruntime
from lampq.runtime.ov import OpenVinoSession
from lampq.runtime.ov import require as require_openvino

RuntimeName = Literal["torch", "onnxruntime", "openvino"]
RUNTIMES: tuple[str, ...] = get_args(RuntimeName)
SESSIONS: dict[str, Callable[..., Session]] = {
    "onnxruntime": OnnxRuntimeSession,
    "openvino": OpenVinoSession,
}
_REQUIRE = {"onnxruntime": require_onnxruntime, "openvino": require_openvino}
# images to logits: an nn.Module or a Session
Deployed = Callable[[Tensor], Tensor]


def check_runtime(runtime: str) -> None:
    """Raise if there is no such runtime, or if it is not installed."""
    if runtime not in RUNTIMES:
        raise ConfigError(f"unknown runtime {runtime!r}; known: {', '.join(RUNTIMES)}")
    if runtime in _REQUIRE:
        _REQUIRE[runtime]()


def installed() -> tuple[str, ...]:
    """The runtimes beside torch that are there."""
    from importlib.util import find_spec

    return tuple(name for name in SESSIONS if find_spec(name) is not None)


def load(
    path: Path,
    runtime: str = "torch",
    model: nn.Module | None = None,
    *,
    threads: int | None = None,
) -> Deployed:
    """The model of a file in a runtime.

    A packed checkpoint is unpacked and its graph is built in memory. An ONNX file is for the
    runtimes other than torch. ``model`` is the float architecture, needed only for classes that
    timm does not know. The threads of torch belong to the process and not to a model.
    """
    check_runtime(runtime)
    if runtime == "torch" and threads is not None:
        raise ConfigError(
            "torch has one number of threads for the whole process: leave threads out, and call "
            "torch.set_num_threads"
        )
    if path.suffix == ".onnx":
        if runtime == "torch":
            raise ConfigError(
                f"{str(path)!r} is an ONNX file, which torch does not run: choose the runtime "
                "onnxruntime or openvino"
            )
        _, content = read_onnx(path)
        return SESSIONS[runtime](content, threads=threads)
    loaded = load_checkpoint(path, model)
    if runtime == "torch":
        return loaded
    return open_model(loaded, runtime, threads=threads)


def open_model(model: nn.Module, runtime: str, *, threads: int | None = None) -> Session:
    """A quantized or float model in explicit form in a runtime, for this processor."""
    graph = onnx_model(model, any_cpu=overflows(runtime))
    return SESSIONS[runtime](graph.SerializeToString(), threads=threads)


@cache
def overflows(runtime: str) -> bool:
    """Whether the runtime's integer products overflow on this processor.

    Without 8-bit dot products two products of 255 and 127 are added in 16 bits, and come out
    smaller than they are.
    """
    g = GraphBuilder()
    width = 64
    x = g.input("x", ("batch", 4, width))
    step, point = g.number(1), g.shared(np.uint8(0))
    codes = g.node("QuantizeLinear", x, step, point, name="codes")
    decoded = g.node("DequantizeLinear", codes, step, point, name="decoded")
    matrix = g.constant("weight", np.full((width, width), 127, dtype=np.int8))
    rows = g.constant("scale", np.ones(width, dtype=np.float32))
    none = g.constant("zero", np.zeros(width, dtype=np.int8))
    weight = g.node("DequantizeLinear", matrix, rows, none, name="rows", axis=1)
    product = g.node("MatMul", decoded, weight, name="product")
    g.output(product, "y", ("batch", 4, width))
    session = SESSIONS[runtime](g.model().SerializeToString(), threads=1)
    found = session.run({"x": np.full((1, 4, width), 255, dtype=np.float32)})["y"]
    return bool((found != 255 * 127 * width).any())
