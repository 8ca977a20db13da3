"""ONNX Runtime."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lampq.artifact.onnx.builder import require_onnx
from lampq.errors import ExportError, MissingDependencyError
from lampq.runtime.base import Array, Session, first_line

# large batches leave the cache: images are run one by one
MICRO_BATCH = 1
INTEGER = {
    "MatMulIntegerToFloat",
    "MatMulInteger",
    "QLinearMatMul",
    "DynamicQuantizeMatMul",
    "QGemm",
    "QLinearConv",
    "ConvInteger",
}


def require() -> Any:
    """The package, or one sentence that says how to get it."""
    try:
        import onnxruntime
    except ImportError:
        raise MissingDependencyError(
            "the runtime onnxruntime is not installed: pip install 'lampq[onnx]'"
        ) from None
    return onnxruntime


class OnnxRuntimeSession(Session):
    """A graph in ONNX Runtime on the CPU.

    ``micro_batch``: how many images are run together.
    """

    runtime: ClassVar[str] = "onnxruntime"

    def __init__(
        self, model: bytes, *, threads: int | None = None, micro_batch: int = MICRO_BATCH
    ) -> None:
        self._model, self.micro_batch = model, micro_batch
        self._session = self._open(threads=threads)
        self.shapes = {
            value.name: tuple(side if isinstance(side, int) else -1 for side in value.shape)
            for value in self._session.get_inputs()
        }
        self._outputs = [value.name for value in self._session.get_outputs()]

    def _open(self, *, threads: int | None = None, optimized: Path | None = None) -> Any:
        onnxruntime = require()
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        if threads is not None:
            options.intra_op_num_threads = threads
        if optimized is not None:
            options.optimized_model_filepath = str(optimized)
        try:
            return onnxruntime.InferenceSession(
                self._model, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            raise ExportError(f"onnxruntime rejects the graph: {first_line(error)}") from error

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        count = max(len(values) for values in feeds.values())
        parts = [
            self._session.run(None, {k: v[i : i + self.micro_batch] for k, v in feeds.items()})
            for i in range(0, count, self.micro_batch)
        ]
        joined = (
            np.concatenate(same) if len(same) > 1 else same[0] for same in zip(*parts, strict=True)
        )
        return dict(zip(self._outputs, joined, strict=True))

    def integer_nodes(self) -> frozenset[str]:
        onnx = require_onnx()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "optimized.onnx"
            self._open(threads=1, optimized=path)
            nodes = onnx.load(path).graph.node
        return frozenset(node.name for node in nodes if node.op_type in INTEGER)
