"""Graphs of whole models and of single sites, against torch, in both runtimes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
from conftest import Case, fits_of
from hypothesis import given
from hypothesis import strategies as st
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from lampq.artifact.onnx import GraphBuilder, families, onnx_model
from lampq.artifact.onnx.folded import PAIR_LIMIT, fold
from lampq.artifact.onnx.sites import matmul, patches, runs_in_integers, tokens_layer, total
from lampq.errors import ExportError
from lampq.graph.attention import explicit
from lampq.quant.base import Quantizer, compact
from lampq.quant.log import LogQuantizer
from lampq.quant.modules import (
    LayerFit,
    MatmulFit,
    QuantConv2d,
    QuantLayer,
    QuantLinear,
    QuantMatMul,
    QuantSum,
    SumFit,
    assemble,
    replace_module,
)
from lampq.quant.prefix import PrefixQuantizer
from lampq.quant.token import PerToken, TokenLogQuantizer, TokenQuantizer
from lampq.quant.twin import TwinGeluQuantizer, TwinSoftmaxQuantizer
from lampq.quant.uniform import UniformQuantizer
from lampq.types import LayerBits, LayerRole, LayerSpec, MatmulSpec, SumSpec
from lampq.verify import off_borders

SMALL: dict[str, Any] = {"depth": 1, "img_size": 64, "embed_dim": 48, "num_heads": 2}
SWIN: dict[str, Any] = {
    "depths": (2, 1),
    "num_heads": (2, 4),
    "embed_dim": 16,
    "num_classes": 10,
    "img_size": 112,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", SMALL),
    "average pooling": ("vit_medium_patch16_gap_240", SMALL),
    "norm before the blocks": ("vit_base_patch16_clip_quickgelu_224", SMALL),
    "register tokens": ("vit_wee_patch16_reg1_gap_256", SMALL),
    "layer scale": ("vit_small_patch14_dinov2", {**SMALL, "img_size": 56, "num_classes": 10}),
    "norms of queries": ("vit_tiny_patch16_224", {**SMALL, "qk_norm": True}),
    "deit": ("deit_tiny_patch16_224", SMALL),
    "two heads": ("deit_tiny_distilled_patch16_224", SMALL),
    "positions of patches": ("deit3_small_patch16_224", SMALL),
    "swin": ("swin_tiny_patch4_window7_224", SWIN),
    "padded windows": ("swin_tiny_patch4_window7_224", {**SWIN, "img_size": 72}),
}


def shaken(model: nn.Module) -> nn.Module:
    """The model with every parameter moved off its initial value."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model.eval()


def run(model: Any, feeds: dict[str, Any], runtime: str = "onnxruntime") -> Any:
    """The only output of a graph."""
    onnx.checker.check_model(model, full_check=True)
    content = model.SerializeToString()
    if runtime == "onnxruntime":
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        return session.run(None, feeds)[0]
    import openvino

    options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    core = openvino.Core()
    return core.compile_model(core.read_model(content), "CPU", options)(feeds)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_graph_of_a_float_model_gives_its_logits(family: str) -> None:
    name, options = FAMILIES[family]
    torch.manual_seed(0)
    model = explicit(shaken(timm.create_model(name, pretrained=False, **options)))
    size = options["img_size"]
    images = torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(0))
    expected = model(images).numpy()
    graph = onnx_model(model)
    for batch in (3, 1):
        found = run(graph, {"images": images[:batch].numpy()})
        assert found.shape == (batch, expected.shape[1])
        np.testing.assert_allclose(found, expected[:batch], atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2)), "the model is a Sequential"),
        (
            lambda: VisionTransformer(**SMALL, num_classes=5, global_pool="map"),
            "it pools by attention",
        ),
        (lambda: VisionTransformer(**SMALL, act_layer=nn.Tanh), "'blocks.0.mlp.act' is a Tanh"),
        (lambda: VisionTransformer(**SMALL, norm_layer=nn.RMSNorm), "norm1' is a RMSNorm"),
        (
            lambda: timm.create_model("vit_relpos_small_patch16_224", **SMALL),
            "the model is a VisionTransformerRelPos",
        ),
    ],
)
def test_what_cannot_be_exported_is_named(build: Any, reason: str) -> None:
    with pytest.raises(ExportError, match=reason):
        onnx_model(explicit(build()))


def grid_of(bits: int, rows: int, kind: str, generator: torch.Generator) -> UniformQuantizer:
    """A weight grid with whole, half, free or far zero points."""
    scale = torch.rand(rows, 1, generator=generator) * 0.02 + 0.01
    middle = torch.rand(rows, 1, generator=generator) * (2**bits - 1)
    zero = {
        "whole": middle.round(),
        "half": middle.floor() + 0.5,
        "free": middle,
        "symmetric": torch.full((rows, 1), 2.0 ** (bits - 1)),
        "far": middle.round() - 300,
    }[kind]
    return UniformQuantizer(bits, scale, zero)


def layer_of(
    bits: int,
    inputs: Quantizer | None,
    kind: str = "whole",
    shape: tuple[int, int] = (12, 20),
    seed: int = 0,
    output: Quantizer | None = None,
) -> QuantLinear:
    """A linear layer with random codes, all of them used."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, shape, generator=generator)
    codes[:, 0], codes[:, 1] = 0, 2**bits - 1
    fit = LayerFit(
        LayerSpec("layer", LayerRole.FC1, 0, codes.numel()),
        LayerBits(bits, 8 if inputs is None else inputs.bits),
        compact(codes, bits),
        torch.randn(shape[0], generator=generator),
        grid_of(bits, shape[0], kind, generator),
        inputs,
        output_quantizer=output,
    )
    return QuantLinear(fit, shape)


@given(
    bits=st.integers(1, 8),
    kind=st.sampled_from(["whole", "half", "free", "symmetric", "far"]),
    seed=st.integers(0, 1000),
)
def test_a_folded_weight_is_the_decoded_one(bits: int, kind: str, seed: int) -> None:
    layer = layer_of(bits, None, kind, seed=seed)
    folded = fold(layer)
    centre = 0 if folded.centre is None else folded.centre.astype(np.float64)[:, None]
    rebuilt = folded.values.astype(np.float64) * folded.scale.astype(np.float64)[:, None] + centre
    expected = layer.weight.double().numpy()
    np.testing.assert_allclose(rebuilt, expected, atol=3e-7 * np.abs(expected).max())


@pytest.mark.parametrize("bits", range(1, 9))
def test_a_weight_with_its_zero_point_in_the_middle_needs_no_centre(bits: int) -> None:
    assert fold(layer_of(bits, None, "symmetric")).centre is None


@pytest.mark.parametrize("bits", range(1, 8))
@pytest.mark.parametrize("kind", ["whole", "half"])
def test_a_weight_below_eight_bits_needs_no_centre(bits: int, kind: str) -> None:
    folded = fold(layer_of(bits, None, kind))
    assert folded.centre is None or (bits == 7 and kind == "half")


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("top", [1, 15, 127, 255])
def test_products_of_a_part_never_overflow_in_pairs(bits: int, top: int) -> None:
    folded = fold(layer_of(bits, None, "whole"))
    parts = [part.astype(np.int64) for part in folded.parts(top, any_cpu=True)]
    assert all(2 * top * np.abs(part).max() <= PAIR_LIMIT for part in parts)
    np.testing.assert_array_equal(sum(parts), folded.values)
    assert len(folded.parts(top, any_cpu=False)) == 1


def tokens(grid: Quantizer | None, shape: tuple[int, ...], low: float, high: float) -> Tensor:
    """Random inputs, none of which is near to a border between two codes."""
    x = torch.rand(shape, generator=torch.Generator().manual_seed(5)) * (high - low) + low
    if grid is None:
        return x
    step = (high - low) * 1e-3
    if isinstance(grid, PerToken):  # the largest ones, which make the grid, are far from it
        grid = grid.at(x)
    near = grid.encode(x - step) != grid.encode(x + step)
    return torch.where(near, x + 3 * step, x)


def one_site(
    site: nn.Module, operands: tuple[Tensor, ...], *, any_cpu: bool = True, known: bool = False
) -> Any:
    """The graph of a single layer or product; ``known``: it is told how many tokens there are."""
    g = GraphBuilder(any_cpu=any_cpu)
    g.tokens = operands[0].shape[-2] if known else None
    names = [g.input(f"x{i}", ("batch", *operand.shape[1:])) for i, operand in enumerate(operands)]
    if isinstance(site, QuantMatMul):
        value = matmul(g, site, "site", *names)
    elif isinstance(site, QuantSum):
        value = total(g, site, "site", *names)
    elif isinstance(site, QuantConv2d):
        _, channels, height, width = operands[0].shape
        value, _ = patches(g, site, "site", names[0], (channels, height, width))
    else:
        assert isinstance(site, QuantLayer)
        value = tokens_layer(g, site, "site", names[0])
    rank = 4 if isinstance(site, QuantMatMul) else 3
    g.output(value, "y", ("batch", *"mnk"[: rank - 1]))
    return g.model()


def assert_same(
    site: nn.Module,
    operands: tuple[Tensor, ...],
    runtime: str,
    *,
    any_cpu: bool = True,
    known: bool = False,
) -> None:
    """The graph of a site gives what torch gives in double precision."""
    exact = site.double()(*(operand.double() for operand in operands)).numpy()
    if isinstance(site, QuantConv2d):
        exact = exact.reshape(*exact.shape[:2], -1).transpose(0, 2, 1)
    graph = one_site(site.float(), operands, any_cpu=any_cpu, known=known)
    found = run(graph, {f"x{i}": x.numpy() for i, x in enumerate(operands)}, runtime)
    np.testing.assert_allclose(found, exact, atol=1e-6 * np.ptp(exact), rtol=0)


RUNTIMES = ["onnxruntime", "openvino"]


def uniform(bits: int, zero: float = 0.4) -> UniformQuantizer:
    """An input grid from about -1 to 2, with its zero point at a share of the codes."""
    top = 2**bits - 1
    return UniformQuantizer(bits, torch.tensor(3.0 / top), torch.tensor(float(zero * top)))


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("bits", range(1, 9))
def test_an_integer_layer_gives_what_torch_gives(bits: int, runtime: str) -> None:
    grid = uniform(bits)
    grid.zero.round_()
    layer = layer_of(bits, grid, "whole")
    assert_same(layer, (tokens(grid, (2, 7, 20), -1.5, 2.5),), runtime)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(
    ("bits", "inputs", "kind", "zero"),
    [
        (1, 1, "free", 0.37),
        (1, 8, "half", 0.0),
        (8, 8, "free", 0.413),
        (3, 4, "whole", -0.6),
        (4, 3, "far", 1.4),
        (7, 5, "half", 0.5),
    ],
)
def test_zero_points_that_are_no_codes_are_exact(
    bits: int, inputs: int, kind: str, zero: float, runtime: str
) -> None:
    grid = uniform(inputs, zero)
    x = tokens(grid, (2, 7, 20), -1.5, 2.5)
    assert_same(layer_of(bits, grid, kind), (x,), runtime)


FLOAT_GRIDS: dict[str, tuple[Quantizer, float, float]] = {
    "log": (
        LogQuantizer(4, torch.tensor(2.0), torch.tensor([0.17]), torch.tensor([0.0]), step=29),
        -0.17,
        2.3,
    ),
    "log, zero reserved": (
        LogQuantizer(
            3,
            torch.tensor(1.0),
            torch.tensor([0.0]),
            torch.tensor([0.0]),
            step=60,
            zero_code="reserved",
        ),
        0.0,
        1.0,
    ),
    "twin of GELU": (
        TwinGeluQuantizer.reaching(4, torch.tensor(0.17), torch.tensor(0.3)),
        -0.17,
        2.5,
    ),
    "twin at one bit": (
        TwinGeluQuantizer.reaching(1, torch.tensor(0.17), torch.tensor(0.9)),
        -0.17,
        1.5,
    ),
    "one range a token": (TokenQuantizer(4, torch.tensor(0.7)), -1.0, 2.0),
    "one range a token at one bit": (TokenQuantizer(1, torch.tensor(0.4)), -1.0, 2.0),
    "powers of the size of a token": (
        TokenLogQuantizer(3, torch.tensor([0.7]), torch.tensor([0.17]), step=30),
        -0.17,
        2.0,
    ),
    "powers of the whole size": (
        TokenLogQuantizer(4, torch.ones(1), torch.zeros(1), step=37),
        0.0,
        2.0,
    ),
    "one scale a channel": (
        UniformQuantizer(4, torch.linspace(0.1, 0.2, 20), torch.linspace(2, 9, 20)),
        -1.0,
        2.0,
    ),
}


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("name", FLOAT_GRIDS)
def test_other_inputs_are_float_operators_of_the_same_values(name: str, runtime: str) -> None:
    grid, low, high = FLOAT_GRIDS[name]
    x = tokens(grid, (2, 7, 20), low, high)
    assert_same(layer_of(4, grid), (x,), runtime)


SOFTMAX_GRIDS: dict[str, Quantizer] = {
    "powers of the size of a row": TokenLogQuantizer(3, torch.ones(1), torch.zeros(1), step=37),
    "log": LogQuantizer.log_sqrt2(4, torch.tensor(1.0)),
    "twin": TwinSoftmaxQuantizer.splitting(4, torch.tensor(0.25)),
    "twin whose coarse grid is inside": TwinSoftmaxQuantizer.splitting(3, torch.tensor(1.0)),
    "twin at one bit": TwinSoftmaxQuantizer.splitting(1, torch.tensor(0.5)),
    "one scale a head": UniformQuantizer(
        4, torch.tensor([0.05, 0.06]).view(2, 1, 1), torch.tensor([0.0, 2.0]).view(2, 1, 1)
    ),
}


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("name", SOFTMAX_GRIDS)
def test_a_product_gives_what_torch_gives(name: str, runtime: str) -> None:
    left, right = SOFTMAX_GRIDS[name], uniform(4, 0.5)
    site = QuantMatMul(MatmulFit(MatmulSpec("site", "av", 0), left, right))
    a = tokens(left, (2, 2, 5, 9), 0.0, 1.0)
    b = tokens(right, (2, 2, 9, 6), -1.4, 1.4)
    assert_same(site, (a, b), runtime)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("bits", [1, 3, 8])
def test_a_product_of_queries_and_keys_with_ranges_per_token_gives_what_torch_gives(
    bits: int, runtime: str
) -> None:
    clip = torch.tensor([0.5, 0.8]).view(2, 1, 1)
    left, right = TokenQuantizer(bits, clip), TokenQuantizer(bits, clip, axis=-2)
    site = QuantMatMul(MatmulFit(MatmulSpec("site", "qk", 0), left, right))
    a = off_borders(left, tokens(None, (2, 2, 5, 9), -1.0, 2.0))
    b = off_borders(right, tokens(None, (2, 2, 9, 6), -1.4, 1.4))
    assert_same(site, (a, b), runtime)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("known", [False, True], ids=["in parts", "at once"])
@pytest.mark.parametrize("kind", ["token", "uniform"])
@pytest.mark.parametrize("count", [1, 2])
def test_first_tokens_of_another_width_give_what_torch_gives(
    count: int, kind: str, known: bool, runtime: str
) -> None:
    clip = torch.tensor([0.5, 0.8]).view(2, 1, 1)
    scale, zero = torch.tensor([0.4, 0.5]).view(2, 1, 1), torch.tensor([3.0, 2.6]).view(2, 1, 1)

    def grid(axis: int) -> PrefixQuantizer:
        body = TokenQuantizer(3, clip, axis=axis)
        other = UniformQuantizer(3, scale, zero)
        first = TokenQuantizer(8, torch.ones(1), axis=axis)
        body = body if kind == "token" else other
        return PrefixQuantizer(3, first, body, count=count, axis=axis)

    left, right = grid(-1), grid(-2)
    site = QuantMatMul(MatmulFit(MatmulSpec("site", "qk", 0), left, right))
    a = off_borders(left, tokens(None, (2, 2, 6, 9), -1.0, 2.0))
    b = off_borders(right, tokens(None, (2, 2, 9, 6), -1.4, 1.4))
    assert ("Slice" in kinds(one_site(site, (a, b), known=known))) != known
    assert_same(site, (a, b), runtime, known=known)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(
    "grid",
    [
        TokenQuantizer(3, torch.tensor(0.7)),
        TokenLogQuantizer(3, torch.tensor([0.7]), torch.zeros(1), step=30),
    ],
    ids=["even", "log"],
)
def test_tokens_without_a_range_stay_finite_in_every_runtime(grid: PerToken, runtime: str) -> None:
    x = tokens(grid, (2, 7, 20), -1.0, 2.0)
    x[:, 3] = 0
    assert_same(layer_of(4, grid), (x,), runtime)


def embedding_of(linear: QuantLinear) -> QuantConv2d:
    """The layer on patches of 4 x 4 pixels instead of tokens."""
    fit = LayerFit(
        linear.spec,
        linear.bits,
        linear.codes,
        linear.bias,
        linear.weight_quantizer,
        linear.input_quantizer,
        output_quantizer=linear.output_quantizer,
    )
    rows, columns = linear.codes.shape
    return QuantConv2d(fit, nn.Conv2d(columns // 16, rows, 4, stride=4))


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("inputs", [None, 8, 4])
def test_a_patch_embedding_gives_what_torch_gives(inputs: int | None, runtime: str) -> None:
    grid = None if inputs is None else uniform(inputs)
    layer = embedding_of(layer_of(4, grid, "whole", (12, 32)))
    images = tokens(grid, (3, 2, 8, 12), -1.0, 2.0)
    assert_same(layer, (images,), runtime)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(("inputs", "zero"), [(8, 133), (8, 132), (4, 7), (8, 100.5), (8, -3)])
def test_pixels_on_the_border_between_two_codes_take_the_code_of_torch(
    inputs: int, zero: float, runtime: str
) -> None:
    # a step that is a power of two: every border is a number of its own, and no runtime rounds it
    grid = UniformQuantizer(inputs, torch.tensor(2.0**-6), torch.tensor(float(zero)))
    layer = embedding_of(layer_of(4, grid, "whole", (12, 16)))
    borders = torch.arange(2**inputs).float() + 0.5 - zero
    images = (borders * grid.scale).repeat(256 // len(borders)).view(1, 1, 16, 16)
    assert_same(layer, (images,), runtime)


def kinds(graph: Any) -> set[str]:
    """The operators of a graph."""
    return {node.op_type for node in graph.graph.node}


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("widths", [(9, 8), (10, 4), (8, 9), (3, 10), (10, 10)], ids=str)
def test_more_than_eight_bits_are_float_operators_of_the_same_values(
    widths: tuple[int, int], runtime: str
) -> None:
    bits, inputs = widths
    grid = uniform(inputs)
    grid.zero.round_()
    layer = layer_of(bits, grid, "symmetric")
    x = tokens(None, (2, 7, 20), -1.5, 2.5)
    step = float(grid.scale) / 50
    x = torch.where(grid.encode(x - step) != grid.encode(x + step), x + 3 * step, x)
    assert not runs_in_integers(layer)
    assert not kinds(one_site(layer, (x,))) & {"QuantizeLinear", "DequantizeLinear"}
    assert_same(layer, (x,), runtime)


def test_a_wide_weight_is_never_folded() -> None:
    with pytest.raises(AssertionError, match="wider codes are no int8 numbers"):
        fold(layer_of(9, None, "whole"))


def assert_same_codes(
    site: nn.Module, opened: Tensor, output: Quantizer, operands: tuple[Tensor, ...], runtime: str
) -> None:
    """The graph gives the codes of torch, but for outputs next to a border; these are few."""
    feeds = {f"x{i}": x.numpy() for i, x in enumerate(operands)}
    found = torch.from_numpy(run(one_site(site, operands), feeds, runtime))
    margin = 1e-3 * output.scale
    sure = output.encode(opened - margin) == output.encode(opened + margin)
    assert 0.9 < float(sure.double().mean()) <= 1
    exact = output(opened)
    assert float((exact - opened).abs().max()) > 0
    assert float((found - exact).abs()[sure].max()) <= 1e-6 * float(exact.max() - exact.min())


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("inputs", [4, 10])
def test_the_output_of_a_layer_is_quantized(inputs: int, runtime: str) -> None:
    grid, output = uniform(inputs), UniformQuantizer(5, torch.tensor(0.21), torch.tensor(14.0))
    x = tokens(grid if inputs == 4 else None, (2, 7, 20), -1.5, 2.5)
    opened = layer_of(4, grid)(x)
    assert_same_codes(layer_of(4, grid, output=output), opened, output, (x,), runtime)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("inputs", [None, 8])
def test_the_output_of_a_patch_embedding_is_quantized(inputs: int | None, runtime: str) -> None:
    grid = None if inputs is None else uniform(inputs)
    output = UniformQuantizer(4, torch.tensor(0.3), torch.tensor(7.0))
    images = tokens(grid, (3, 2, 8, 12), -1.0, 2.0)

    def embedding(outputs: Quantizer | None) -> QuantConv2d:
        return embedding_of(layer_of(4, grid, "whole", (12, 32), output=outputs))

    opened = embedding(None)(images).flatten(2).transpose(1, 2)
    assert_same_codes(embedding(output), opened, output, (images,), runtime)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("left", [None, 4])
@pytest.mark.parametrize("right", [None, 9])
def test_a_product_is_quantized_and_operands_may_stay_in_float(
    left: int | None, right: int | None, runtime: str
) -> None:
    output = UniformQuantizer(6, torch.tensor(0.2), torch.tensor(30.5))
    grids = [None if bits is None else uniform(bits, 0.5) for bits in (left, right)]
    a, b = tokens(grids[0], (2, 2, 5, 9), -1.4, 1.4), tokens(None, (2, 2, 9, 6), -1.4, 1.4)
    opened = QuantMatMul(MatmulFit(MatmulSpec("site", "qk", 0), *grids))
    site = QuantMatMul(MatmulFit(MatmulSpec("site", "qk", 0), *grids, output))
    assert_same(opened, (a, b), runtime)
    assert_same_codes(site, opened(a, b), output, (a, b), runtime)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("bits", [3, 10])
def test_a_sum_is_quantized(bits: int, runtime: str) -> None:
    output = uniform(bits)
    a, b = tokens(None, (2, 7, 20), -0.8, 1.2), tokens(None, (2, 7, 20), -0.4, 1.4).flip(1)
    site = QuantSum(SumFit(SumSpec("site", LayerRole.PROJ, 0), output))
    assert_same_codes(site, a + b, output, (a, b), runtime)


@pytest.mark.parametrize("name", ["blocks.0.attn.qk", "blocks.0.sum1"])
def test_a_part_that_is_neither_float_nor_quantized_is_named(name: str) -> None:
    model = explicit(VisionTransformer(**SMALL))
    replace_module(model, name, nn.Bilinear(1, 1, 1))
    with pytest.raises(ExportError, match=f"'{name}' is a Bilinear, and export knows"):
        onnx_model(model)


def test_images_must_be_of_whole_patches() -> None:
    g = GraphBuilder()
    x = g.input("x", ("batch", 2, 9, 8))
    with pytest.raises(ExportError, match="export needs images of whole patches"):
        patches(g, nn.Conv2d(2, 12, 4, stride=4), "site", x, (2, 9, 8))


def test_a_quantized_part_without_a_place_in_the_graph_is_named(
    vit: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = assemble(vit.model, *fits_of(vit, "psaq", 4))
    plain = lambda g, _site, name, a, b: g.node("Add", a, b, name=name)  # noqa: E731
    monkeypatch.setattr(families, "total", plain)
    with pytest.raises(ExportError, match=r"'blocks\.0\.sum1' has no place in the graph"):
        onnx_model(model)
    onnx_model(vit.model)
