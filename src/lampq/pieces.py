"""The ONNX file in pieces, against torch.

It is cut between its blocks, and every piece is run on what torch gives it. What is quantized is
compared before it is: codes hide small differences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from lampq.artifact.onnx import INPUT, OUTPUT
from lampq.artifact.onnx.builder import require_onnx
from lampq.graph.blocks import explicit_blocks
from lampq.quant.modules import QuantConv2d, QuantLayer, QuantMatMul, QuantSum
from lampq.runtime import SESSIONS


def _blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks by the names of their outputs in the graph."""
    kinds = explicit_blocks()
    return {f"{name}/output": m for name, m in model.named_modules() if isinstance(m, kinds)}


def _quantized(model: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """Quantizers of outputs by the names of their inputs in the graph; and whether of patches."""
    for name, module in model.named_modules():
        if isinstance(module, QuantLayer) and module.output_quantizer is not None:
            yield f"{name}/output", module.output_quantizer, isinstance(module, QuantConv2d)
        elif isinstance(module, QuantMatMul) and module.output is not None:
            yield f"{name}/product", module.output, False
        elif isinstance(module, QuantSum):
            yield f"{name}/total", module.quantizer, False


@contextmanager
def _watched(
    model: nn.Module, blocks: dict[str, Tensor], values: dict[str, Tensor]
) -> Iterator[None]:
    """Outputs of blocks, and inputs of the quantizers of outputs, while the context lasts."""

    def keep_output(name: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        return module.register_forward_hook(
            lambda _module, _inputs, output: blocks.__setitem__(name, output)
        )

    def keep_input(
        name: str, module: nn.Module, *, patches: bool
    ) -> torch.utils.hooks.RemovableHandle:
        def keep(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            values[name] = inputs[0].flatten(2).transpose(1, 2) if patches else inputs[0]

        return module.register_forward_pre_hook(keep)

    handles = [keep_output(name, module) for name, module in _blocks(model).items()]
    handles += [keep_input(name, grid, patches=p) for name, grid, p in _quantized(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _cut(content: bytes, blocks: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> bytes:
    """The file with all of these values as outputs, and blocks given to what comes behind them."""
    onnx = require_onnx()
    model = onnx.load_model_from_string(content)
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            if name in blocks:
                node.input[place] = f"{name}:given"
    kind, described = onnx.TensorProto.FLOAT, onnx.helper.make_tensor_value_info
    for name, output in blocks.items():
        shape = ["batch", *output.shape[1:]]
        model.graph.input.append(described(f"{name}:given", kind, shape))
        model.graph.output.append(described(name, kind, shape))
    model.graph.output.extend(described(name, kind, None) for name in values)
    cut: bytes = model.SerializeToString()
    return cut


def level_names(levels: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The levels of a pyramid by the names of their outputs in the graph."""
    return {f"level_{name}": level for name, level in levels.items()}


@torch.no_grad()
def worst_piece(
    model: nn.Module, content: bytes, runtime: str, images: Tensor
) -> tuple[float, str]:
    """The largest median error of any piece of the file, in ranges of its values, and its name.

    The median is that of all values: those that a flipped code reaches may be far off.
    """
    blocks: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    with _watched(model, blocks, values):
        answer = model(images)
    # a classifier gives logits, a pyramid its levels by name
    outputs = {OUTPUT: answer} if isinstance(answer, Tensor) else level_names(answer)
    session = SESSIONS[runtime](_cut(content, blocks, values))
    feeds = {f"{name}:given": output.numpy() for name, output in blocks.items()}
    found = session.run({INPUT: images.numpy(), **feeds})
    errors = {}
    for name, exact in {**values, **blocks, **outputs}.items():
        right = exact.numpy().reshape(found[name].shape)
        spread = max(float(np.ptp(right)), 1e-30)
        errors[name] = float(np.median(np.abs(found[name] - right))) / spread
    worst = max(errors, key=lambda name: np.inf if np.isnan(errors[name]) else errors[name])
    return errors[worst], worst.rpartition("/")[0] or worst
