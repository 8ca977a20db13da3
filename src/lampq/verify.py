"""Whether a graph computes in a runtime what the torch model computes.

Every quantized site is run alone, on inputs of the torch model, and compared with the torch module
in double precision. The file itself is cut between its blocks, and every piece is run on what torch
gives it. The whole model is compared by its answers: a difference in the last digit may move a
value across the border between two codes, and the layers behind amplify that, in torch as in any
runtime. At few bits torch in single and in double precision end as far apart as two models with
another rounding, so a runtime is asked to agree with torch as well as torch with itself.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lampq.artifact.onnx import GraphBuilder
from lampq.artifact.onnx.builder import require_onnx
from lampq.artifact.onnx.sites import (
    convolution,
    is_patches,
    matmul,
    patches,
    product_nodes,
    runs_in_integers,
    tokens_layer,
    total,
)
from lampq.data import Samples
from lampq.errors import ExportError
from lampq.hooks import recording
from lampq.pieces import worst_piece
from lampq.progress import Progress
from lampq.quant.base import Quantizer
from lampq.quant.log import LogQuantizer
from lampq.quant.modules import QuantConv2d, QuantLayer, QuantMatMul, QuantSum
from lampq.quant.prefix import PrefixQuantizer
from lampq.quant.token import PerToken
from lampq.quant.twin import TwinGeluQuantizer, TwinSoftmaxQuantizer
from lampq.quant.uniform import UniformQuantizer
from lampq.runtime import SESSIONS
from lampq.runtime.base import Session

TOLERANCE = 1e-6
# products in float: rounding of single precision, as it grows with the root of their length
ROUNDING = 2.0**-23
AGREEMENT = 99.0
# images whose inputs the sites get, and tokens of each
PARTS, TOKENS = 2, 128
BATCH, SINGLE = 25, 8
# how near to the border between two codes an input may be, in steps
MARGIN = 0.01


@dataclass(frozen=True, slots=True)
class PartsVerification:
    """What was found of the parts of a graph in one runtime.

    ``error`` is the largest of any layer on integer kernels, in ranges of its output, and
    ``float_error`` that of what is in float. ``block_error`` is the largest median error of a piece
    of the file, likewise.
    ``integer`` are the layers on integer kernels, ``floating`` those meant to be in float.
    ``images`` is the number of samples.
    """

    runtime: str
    version: str
    error: float
    float_error: float
    block_error: float
    integer: tuple[str, ...]
    floating: tuple[str, ...]
    images: int

    def to_json(self) -> dict[str, Any]:
        """The fields, with the number of integer layers instead of their names."""
        return {**asdict(self), "integer": len(self.integer), "floating": list(self.floating)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification(PartsVerification):
    """What was found of a classifier.

    ``agreement`` is the percentage of images with the answer of the torch model, ``own_agreement``
    that of torch with itself in double precision; None where it was not needed.
    """

    agreement: float
    own_agreement: float | None


def verify(
    model: nn.Module,
    content: bytes,
    runtime: str,
    samples: Samples,
    expected: Tensor,
    *,
    any_cpu: bool,
    progress: Progress | None = None,
) -> Verification:
    """What was found; raises an ExportError that names what is not as it should be.

    ``content`` is the file of the model and ``expected`` are the torch logits of the samples.
    """
    progress = progress or Progress()
    session = SESSIONS[runtime](content)
    found = verify_parts(model, content, session, samples, any_cpu=any_cpu)
    # some one by one: a runtime may have another form for a single image
    single = [slice(i, i + 1) for i in range(min(SINGLE, len(samples)))]
    parts = single + [slice(i, i + BATCH) for i in range(len(single), len(samples), BATCH)]
    tracked = progress.track(parts, f"comparing answers in {runtime}", len(parts))
    answers = torch.cat([session(samples.inputs(part)).argmax(dim=1) for part in tracked])
    agreement = _share(answers, expected.argmax(dim=1))
    own = None
    if agreement < AGREEMENT:
        own = _own_agreement(model, samples, expected, progress)
        if agreement < min(AGREEMENT, _least(own, len(samples))):
            raise ExportError(
                f"{runtime} agrees with torch on {agreement:.2f} % of {len(samples)} images, less "
                f"than {AGREEMENT:g} % and less than torch with itself in double precision "
                f"({own:.2f} %)"
            )
    return Verification(*astuple(found), agreement=agreement, own_agreement=own)


def verify_parts(
    model: nn.Module, content: bytes, session: Session, samples: Samples, *, any_cpu: bool
) -> PartsVerification:
    """Every site alone, and the file in pieces.

    Raises an ExportError that names what is not as it should be.
    """
    runtime = session.runtime
    integer = _integer_layers(model, content, session)
    errors = _site_errors(model, runtime, samples, any_cpu=any_cpu)
    for name, (error, allowed) in errors.items():
        if not error <= allowed:
            raise ExportError(
                f"layer {name!r} in {runtime} differs from torch by {error:.2g} of its output "
                f"range, more than {allowed:.2g}"
            )
    images = samples.inputs(torch.arange(PARTS) % len(samples))
    block_error, block = worst_piece(model, content, runtime, images)
    if not block_error <= TOLERANCE:
        raise ExportError(
            f"{block!r} in {runtime} differs from torch by {block_error:.2g} of its output range "
            f"in the median, more than {TOLERANCE:g}"
        )
    floating = tuple(
        name
        for name, layer in model.named_modules()
        if isinstance(layer, QuantLayer) and name not in integer
    )
    return PartsVerification(
        runtime,
        version_of(runtime),
        max((errors[name][0] for name in integer), default=0.0),
        max((error for name, (error, _) in errors.items() if name not in integer), default=0.0),
        block_error,
        integer,
        floating,
        len(samples),
    )


def _share(answers: Tensor, others: Tensor) -> float:
    return 100 * float((answers == others).double().mean())


@torch.no_grad()
def _own_agreement(
    model: nn.Module, samples: Samples, expected: Tensor, progress: Progress
) -> float:
    """On how many images, in percent, torch in double precision gives its own answer."""
    double = copy.deepcopy(model).double()
    batches = progress.track(
        samples.batches(BATCH), "comparing torch with itself", -(-len(samples) // BATCH)
    )
    answers = torch.cat([double(images.double()).argmax(dim=1) for images, _ in batches])
    return _share(answers, expected.argmax(dim=1))


def _least(own: float, images: int) -> float:
    """What is still as good as ``own`` percent: three deviations of the difference below.

    The deviation is that of one answer more of either kind: that all of a few images agree does
    not say that all others would.
    """
    share = (own / 100 * images + 1) / (images + 2)
    return own - 300 * math.sqrt(2 * share * (1 - share) / images)


def version_of(runtime: str) -> str:
    """The installed version of a runtime."""
    from importlib.metadata import version

    return version(runtime)


def _integer_layers(model: nn.Module, content: bytes, session: Session) -> tuple[str, ...]:
    """The layers on integer kernels; raises if one that should be is not."""
    found = session.integer_nodes()
    graph = require_onnx().load_model_from_string(content).graph
    layer_of = product_nodes(model)
    products = {node.name: layer_of[node.name] for node in graph.node if node.name in layer_of}
    for node, layer in products.items():
        if node not in found:
            raise ExportError(
                f"layer {layer!r} has fallen back to float in {session.runtime}: no integer kernel "
                "took it"
            )
    return tuple(dict.fromkeys(products.values()))


def _margin(grid: Quantizer, x: Tensor) -> Tensor:
    """How far an input should be from the border between two codes."""
    if isinstance(grid, LogQuantizer):
        step = 2 ** (grid.step / grid.denominator) - 1
        return MARGIN * step * (x + grid.shift).abs()
    if isinstance(grid, TwinGeluQuantizer | TwinSoftmaxQuantizer):
        return MARGIN * torch.minimum(grid.low, grid.high).expand_as(x)
    assert isinstance(grid, UniformQuantizer), "all kinds that can be exported are here"
    return MARGIN * grid.scale.expand_as(x)


def off_borders(grid: Quantizer | None, x: Tensor) -> Tensor:
    """The inputs, those near to the border between two codes moved off it.

    There a last digit decides which code is taken, and runtimes round it in their own way.
    """
    if grid is None:
        return x
    if isinstance(grid, PrefixQuantizer):
        first, others = grid.parts(x)
        return grid.joined(off_borders(grid.prefix, first), off_borders(grid.body, others))
    # what makes the range of a token is at its last code or beyond: it is not moved
    fixed = grid.at(x) if isinstance(grid, PerToken) else grid
    margin = _margin(fixed, x)
    near = fixed.encode(x - margin) != fixed.encode(x + margin)
    return torch.where(near, x + 2 * margin, x)


@dataclass(frozen=True, slots=True)
class _Site:
    """A quantized module with inputs for it."""

    name: str
    module: nn.Module
    inputs: tuple[Tensor, ...]

    @property
    def _patches(self) -> bool:
        """Whether the site gives the tokens of patches."""
        return isinstance(self.module, QuantConv2d) and is_patches(self.module)

    @property
    def allowed(self) -> float:
        """The largest error, in ranges of the output."""
        if isinstance(self.module, QuantLayer):
            plain = not isinstance(self.module, QuantConv2d) or self._patches
            if runs_in_integers(self.module) and plain:
                return TOLERANCE
            return max(TOLERANCE, ROUNDING * math.sqrt(self.module.codes.shape[1]))
        return max(TOLERANCE, ROUNDING * math.sqrt(self.inputs[0].shape[-1]))

    def exact(self) -> tuple[Tensor, ...]:
        """What the torch module gives in double precision.

        An output that is quantized may take either code where it is near to the border of two.
        """
        opened, grid = _opened(copy.deepcopy(self.module).double())
        output = opened(*(x.double() for x in self.inputs))
        if self._patches:
            output = output.flatten(2).transpose(1, 2)
        if grid is None:
            return (output,)
        fixed = grid.at(output) if isinstance(grid, PerToken) else grid
        margin = _margin(fixed, output)
        return fixed(output - margin), fixed(output + margin)

    def emit(self, g: GraphBuilder) -> None:
        """The site in a graph of its own inputs and output."""
        values = [
            g.input(f"{self.name}:{number}", ("batch", *x.shape[1:]))
            for number, x in enumerate(self.inputs)
        ]
        g.tokens = int(self.inputs[0].shape[-2])
        if isinstance(self.module, QuantMatMul):
            value = matmul(g, self.module, self.name, *values)
        elif isinstance(self.module, QuantSum):
            value = total(g, self.module, self.name, *values)
        elif isinstance(self.module, QuantConv2d):
            _, channels, height, width = self.inputs[0].shape
            if self._patches:
                value, _ = patches(g, self.module, self.name, values[0], (channels, height, width))
            else:
                value = convolution(g, self.module, self.name, values[0], (height, width))
        else:
            assert isinstance(self.module, QuantLayer), "all kinds of sites are here"
            value = tokens_layer(g, self.module, self.name, values[0])
        rank = 3 if self._patches else self.inputs[0].ndim
        shape = ["batch", *(f"{self.name}:{axis}" for axis in range(1, rank))]
        g.output(value, f"{self.name}:output", shape)

    def feeds(self) -> dict[str, Any]:
        """The inputs by name."""
        return {f"{self.name}:{n}": np.ascontiguousarray(x) for n, x in enumerate(self.inputs)}


def _opened(module: nn.Module) -> tuple[Callable[..., Tensor], Quantizer | None]:
    """What the module computes before its output is quantized, and the quantizer of that."""
    if isinstance(module, QuantLayer):
        grid, module.output_quantizer = module.output_quantizer, None
        return module, grid
    if isinstance(module, QuantMatMul):
        grid, module.output = module.output, None
        return module, grid
    assert isinstance(module, QuantSum), "all kinds of sites are here"
    return torch.add, module.quantizer


def _sites(model: nn.Module, samples: Samples) -> Iterator[_Site]:
    """Every quantized site with inputs of the torch model on a few images."""
    kinds = (QuantLayer, QuantMatMul, QuantSum)
    names = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    images = samples.inputs(torch.arange(PARTS) % len(samples))
    with torch.no_grad(), recording(model, names) as seen:
        model(images)
        recorded: Mapping[str, tuple[Tensor, ...]] = dict(seen)
    for name in names:
        module = model.get_submodule(name)
        inputs = recorded[name]
        if isinstance(module, QuantMatMul):
            left, right = (_spread(x, PARTS) for x in inputs)
            pair = off_borders(module.left, left), off_borders(module.right, right)
            yield _Site(name, module, pair)
            continue
        if isinstance(module, QuantSum):
            yield _Site(name, module, inputs)
            continue
        assert isinstance(module, QuantLayer), "only these were asked for"
        (x,) = inputs
        if not isinstance(module, QuantConv2d):
            tokens = _spread(x.flatten(0, -2), PARTS * TOKENS)
            x = tokens[: len(tokens) // PARTS * PARTS].reshape(PARTS, -1, tokens.shape[-1])
        yield _Site(name, module, (off_borders(module.input_quantizer, x),))


def _spread(x: Tensor, count: int) -> Tensor:
    """At most so many rows, evenly spread."""
    if len(x) <= count:
        return x
    return x[torch.linspace(0, len(x) - 1, count).long()]


@torch.no_grad()
def _site_errors(
    model: nn.Module, runtime: str, samples: Samples, *, any_cpu: bool
) -> dict[str, tuple[float, float]]:
    """The error of every site, in ranges of its output, and what is allowed."""
    sites = list(_sites(model, samples))
    g = GraphBuilder(any_cpu=any_cpu)
    for site in sites:
        site.emit(g)
    session = SESSIONS[runtime](g.model().SerializeToString())
    outputs = session.run({name: x for site in sites for name, x in site.feeds().items()})
    errors = {}
    for site in sites:
        right = [exact.numpy() for exact in site.exact()]
        found = outputs[f"{site.name}:output"].astype(np.float64)
        spread = float(np.ptp(right[0]))
        nearest = np.min([np.abs(found - exact) for exact in right], axis=0)
        errors[site.name] = (float(nearest.max()) / max(spread, 1e-30), site.allowed)
    return errors
