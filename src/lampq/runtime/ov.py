"""OpenVINO."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar

import numpy as np

from lampq.errors import ExportError, MissingDependencyError
from lampq.runtime.base import Array, Session, first_line

INTEGER = {"u8", "i8"}
PRODUCTS = {"FullyConnected", "MatMul", "Convolution"}


def require() -> Any:
    """The package, or one sentence that says how to get it."""
    try:
        import openvino
    except ImportError:
        raise MissingDependencyError(
            "the runtime openvino is not installed: pip install 'lampq[openvino]'"
        ) from None
    return openvino


@cache
def _core() -> Any:
    return require().Core()


class OpenVinoSession(Session):
    """A graph in OpenVINO on the CPU: the bytes of an ONNX file, or a model of OpenVINO's own.

    A single image has a graph of fixed shapes, which is faster; larger batches share a second one
    of dynamic shapes, made when it is first needed. ``precision`` is that of what is not integer;
    bf16 is faster where the processor has it and is not what was verified.
    """

    runtime: ClassVar[str] = "openvino"

    def __init__(self, model: Any, *, threads: int | None = None, precision: str = "f32") -> None:
        # activations of float layers must not be quantized on the fly
        self._options: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": precision,
            "PERFORMANCE_HINT": "LATENCY",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
        }
        if threads is not None:
            self._options["INFERENCE_NUM_THREADS"] = threads
        core = _core()
        with _told():
            self._graph = core.read_model(model) if isinstance(model, bytes) else model
        self.shapes = {
            value.get_any_name(): tuple(
                side.get_length() if side.is_static else -1 for side in value.get_partial_shape()
            )
            for value in self._graph.inputs
        }
        self._outputs = [value.get_any_name() for value in self._graph.outputs]
        self._requests: dict[bool, Any] = {}
        self._request(alone=len(self.shapes) == 1)

    def _request(self, *, alone: bool) -> Any:
        """What runs one image, or any number of them."""
        if alone not in self._requests:
            with _told():
                graph = self._graph
                if alone:
                    graph = graph.clone()
                    graph.reshape({n: [1, *shape[1:]] for n, shape in self.shapes.items()})
                compiled = _core().compile_model(graph, "CPU", self._options)
            self._requests[alone] = compiled.create_infer_request()
        return self._requests[alone]

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        inputs = {name: np.ascontiguousarray(values) for name, values in feeds.items()}
        alone = len(inputs) == 1 and all(len(values) == 1 for values in inputs.values())
        results = self._request(alone=alone).infer(inputs, share_inputs=True)
        # the buffers belong to the request and are written again
        return {name: results[i].copy() for i, name in enumerate(self._outputs)}

    def integer_nodes(self) -> frozenset[str]:
        single = (True, False) if len(self.shapes) == 1 else (False,)
        forms = [self._request(alone=alone).get_compiled_model() for alone in single]
        return frozenset.intersection(*(_integer_nodes(form) for form in forms))


@contextmanager
def _told() -> Iterator[None]:
    """One sentence if OpenVINO does not take a graph."""
    try:
        yield
    except RuntimeError as error:
        raise ExportError(f"openvino rejects the graph: {first_line(error)}") from error


def _integer_nodes(compiled: Any) -> frozenset[str]:
    found: set[str] = set()
    for node in compiled.get_runtime_model().get_ops():
        about = {key: str(value.value) for key, value in node.get_rt_info().items()}
        if about.get("layerType") in PRODUCTS and about.get("runtimePrecision") in INTEGER:
            parts = about.get("originalLayersNames", "").split(",")
            # a product whose zero points are zero goes by the name of its scale alone
            found.update(part.split("/Dequantization")[0] for part in parts)
    return frozenset(found)
