"""A standard ONNX graph, put together node by node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lampq.errors import MissingDependencyError
from lampq.version import __version__

# LayerNormalization came with 17; per-channel DequantizeLinear is older
OPSET, IR_VERSION = 17, 8
BATCH = "batch"
Array = NDArray[Any]
Shape = Sequence[int | str]


def require_onnx() -> Any:
    """The onnx package, or one sentence that says how to get it."""
    try:
        import onnx
    except ImportError:
        raise MissingDependencyError(
            "ONNX graphs need the package onnx: pip install 'lampq[onnx]'"
        ) from None
    return onnx


class GraphBuilder:
    """Nodes and constants of one graph; values are known by name.

    ``any_cpu``: integer products must be right also on processors that sum them in 16 bits.
    ``placed`` are the quantized modules whose nodes are there, by name. ``tokens``: how many tokens
    an image has, where all of them go through all layers; None if nobody knows. ``never_negative``
    are values known to be zero or more.
    """

    def __init__(self, *, any_cpu: bool = True) -> None:
        self._onnx, self.any_cpu = require_onnx(), any_cpu
        self.placed: set[str] = set()
        self.tokens: int | None = None
        self.never_negative: set[str] = set()
        self._nodes: list[Any] = []
        self._constants: dict[str, Array] = {}
        self._shared: dict[tuple[Any, ...], str] = {}
        self._names: set[str] = set()
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []

    def input(self, name: str, shape: Shape) -> str:
        """A float input of the graph."""
        self._inputs.append(self._described(name, shape))
        return self._own(name)

    def output(self, value: str, name: str, shape: Shape) -> None:
        """Make a value that no node takes an output of the graph, under another name."""
        self._outputs.append(self._described(self.renamed(value, name), shape))

    def renamed(self, value: str, name: str) -> str:
        """Another name for a value that no node takes yet."""
        assert not any(value in node.input for node in self._nodes), f"{value!r} is in use"
        (made,) = (node for node in self._nodes if value in node.output)
        made.output[list(made.output).index(value)] = self._own(name)
        return name

    def _described(self, name: str, shape: Shape) -> Any:
        kind = self._onnx.TensorProto.FLOAT
        return self._onnx.helper.make_tensor_value_info(name, kind, list(shape))

    def _own(self, name: str) -> str:
        """The name, which no other value may have."""
        assert name not in self._names, f"two values are called {name!r}"
        self._names.add(name)
        return name

    def constant(self, name: str, value: Array) -> str:
        """A tensor of the graph, under its own name."""
        self._constants[self._own(name)] = np.ascontiguousarray(value)
        return name

    def tensor(self, name: str, value: Array) -> str:
        """A tensor under its name, or under another if that name has another value."""
        known = self._constants.get(name)
        if known is None:
            return self.constant(name, value)
        same = known.dtype == value.dtype and np.array_equal(known, value)
        return name if same else self.tensor(f"{name}'", value)

    def shared(self, value: Array | np.generic) -> str:
        """A small tensor that nodes with equal ones share: shapes, axes, scalars."""
        array = np.asarray(value)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._shared:
            self._shared[key] = self.constant(f"constant_{len(self._shared)}", array)
        return self._shared[key]

    def number(self, value: float) -> str:
        """A float scalar."""
        return self.shared(np.float32(value))

    def whole(self, *values: int) -> str:
        """A list of whole numbers, such as a shape or axes."""
        return self.shared(np.array(values, dtype=np.int64))

    def node(self, operator: str, *inputs: str, name: str, **attributes: Any) -> str:
        """A node of one output, which has the name of the node."""
        return self.nodes(operator, *inputs, name=name, outputs=(name,), **attributes)[0]

    def nodes(
        self, operator: str, *inputs: str, name: str, outputs: Sequence[str], **attributes: Any
    ) -> tuple[str, ...]:
        """A node of several outputs."""
        for output in outputs:
            self._own(output)
        made = self._onnx.helper.make_node(
            operator, list(inputs), list(outputs), name=name, **attributes
        )
        self._nodes.append(made)
        return tuple(outputs)

    def indices(self, value: str, name: str) -> str:
        """Whole-numbered floats as integers."""
        return self.node("Cast", value, name=name, to=self._onnx.TensorProto.INT32)

    def model(self, metadata: Mapping[str, str] | None = None) -> Any:
        """The finished model."""
        helper = self._onnx.helper
        constants = [
            self._onnx.numpy_helper.from_array(value, name)
            for name, value in self._constants.items()
        ]
        graph = helper.make_graph(self._nodes, "lampq", self._inputs, self._outputs, constants)
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
            producer_name="lampq",
            producer_version=__version__,
        )
        if metadata:
            helper.set_model_props(model, dict(metadata))
        return model
