"""Verification finds what is wrong, names it, and passes what is right."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from conftest import Case, fits_of
from torch import nn

import lampq.verify
from lampq.artifact.onnx import GraphBuilder, onnx_model
from lampq.errors import ExportError
from lampq.evaluate import predict
from lampq.graph.blocks import Sum
from lampq.progress import Progress
from lampq.quant.base import Quantizer
from lampq.quant.log import LogQuantizer
from lampq.quant.modules import QuantLayer, QuantMatMul, assemble, replace_module
from lampq.quant.token import TokenLogQuantizer, TokenQuantizer
from lampq.quant.twin import TwinGeluQuantizer, TwinSoftmaxQuantizer
from lampq.quant.uniform import UniformQuantizer
from lampq.runtime import SESSIONS
from lampq.types import SEARCHED_ROLES, LayerRole
from lampq.verify import Verification, off_borders, verify

ENGINES = list(SESSIONS)


_MODELS: dict[tuple[int, str, int], nn.Module] = {}


def quantized(case: Case, method: str, bits: int) -> nn.Module:
    """The model of a case at one width, fitted once for all runtimes."""
    key = (id(case), method, bits)
    if key not in _MODELS:
        _MODELS[key] = assemble(case.model, *fits_of(case, method, bits))
    return _MODELS[key]


def verified(model: nn.Module, graph: Any, runtime: str, case: Case) -> Verification:
    logits = predict(model, case.samples)
    content = graph.SerializeToString()
    return verify(model, content, runtime, case.samples, logits, any_cpu=True)


@pytest.fixture(autouse=True)
def answers_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random nets are chaotic: a code that flips may change one of six answers."""
    monkeypatch.setattr(lampq.verify, "AGREEMENT", 60.0)


CASES = [
    ("vit", "minmax", 8),
    ("vit", "adalog", 3),
    ("vit", "ptq4vit", 4),
    ("vit", "repq", 1),
    ("swin", "adalog", 4),
    ("swin", "repq", 6),
]


@pytest.mark.parametrize("runtime", ENGINES)
@pytest.mark.parametrize(("name", "method", "bits"), CASES)
def test_every_site_of_a_good_graph_is_right(
    request: pytest.FixtureRequest, name: str, method: str, bits: int, runtime: str
) -> None:
    case: Case = request.getfixturevalue(name)
    model = quantized(case, method, bits)
    found = verified(model, onnx_model(model), runtime, case)
    assert 0 < found.error <= 1e-6
    assert found.float_error <= 1e-6
    # zero where more than half of the values are those of torch to the last digit
    assert found.block_error <= 1e-6
    layers = [n for n, m in model.named_modules() if isinstance(m, QuantLayer)]
    assert sorted((*found.integer, *found.floating)) == sorted(layers)
    behind_gelu = {n for n in layers if n.endswith("fc2")}
    floats = behind_gelu if method in ("adalog", "ptq4vit") else set()
    if method in ("adalog", "ptq4vit"):
        floats = floats | {"patch_embed.proj"}
    assert set(found.floating) == floats
    assert found.to_json()["integer"] == len(found.integer)


@pytest.mark.parametrize("runtime", ENGINES)
@pytest.mark.parametrize("bits", [1, 3, 8])
def test_ranges_per_token_are_right(case: Case, bits: int, runtime: str) -> None:
    model = assemble(case.model, *fits_of(case, "adalog", bits, input_ranges="token"))
    found = verified(model, onnx_model(model), runtime, case)
    assert max(found.error, found.float_error, found.block_error) <= 1e-6
    projections = {layer.name for layer in case.graph.layers if layer.role is LayerRole.PROJ}
    assert projections <= set(found.floating)


@pytest.mark.parametrize("runtime", ENGINES)
@pytest.mark.parametrize("ranges", ["static", "token"])
def test_first_tokens_of_another_width_are_right(vit: Case, ranges: str, runtime: str) -> None:
    options = {"input_ranges": ranges, "prefix_bits": 8}
    model = assemble(vit.model, *fits_of(vit, "adalog", 3, **options))
    found = verified(model, onnx_model(model), runtime, vit)
    assert max(found.error, found.float_error, found.block_error) <= 1e-6
    floating = {LayerRole.FC2, *([LayerRole.PROJ] if ranges == "token" else [])}
    searched = [layer for layer in vit.graph.layers if layer.role in SEARCHED_ROLES]
    for layer in searched:
        assert (layer.name in found.floating) == (layer.role in floating), layer.name


def test_first_tokens_add_no_second_copy_of_a_weight(vit: Case) -> None:
    sizes = {}
    for prefix_bits in ("target", 8):
        options = {"input_ranges": "static", "prefix_bits": prefix_bits}
        model = assemble(vit.model, *fits_of(vit, "adalog", 3, **options))
        tensors = onnx_model(model).graph.initializer
        codes = [tensor for tensor in tensors if tensor.data_type == onnx.TensorProto.INT8]
        sizes[prefix_bits] = sum(len(tensor.raw_data) for tensor in codes)
    assert sizes[8] == sizes["target"] > 0


@pytest.mark.parametrize("runtime", ENGINES)
@pytest.mark.parametrize("site", ["blocks.1.attn.proj", "blocks.0.attn.qk"])
def test_a_wrong_range_of_tokens_is_found(
    vit: Case, site: str, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = assemble(vit.model, *fits_of(vit, "adalog", 3, input_ranges="token"))
    graph = onnx_model(model)
    node = GraphBuilder.node

    def wrong(g: GraphBuilder, operator: str, *inputs: str, name: str, **more: Any) -> str:
        if operator == "ReduceMax" and name.startswith(site):
            more["axes"] = [1]
        return node(g, operator, *inputs, name=name, **more)

    monkeypatch.setattr(GraphBuilder, "node", wrong)
    with pytest.raises(ExportError, match=rf"'{site}' in {runtime} differs from torch by"):
        verified(model, graph, runtime, vit)


MORE = [("vit", "psaq", 8), ("swin", "psaq", 4), ("swin", "psaq", 9), ("vit", "minmax", 10)]


@pytest.mark.parametrize("runtime", ENGINES)
@pytest.mark.parametrize(("name", "method", "bits"), MORE)
def test_outputs_products_sums_and_wide_layers_are_right(
    request: pytest.FixtureRequest, name: str, method: str, bits: int, runtime: str
) -> None:
    case: Case = request.getfixturevalue(name)
    model = quantized(case, method, bits)
    found = verified(model, onnx_model(model), runtime, case)
    assert max(found.error, found.block_error) <= 1e-6
    assert 0 < found.float_error <= 1e-6
    layers = [n for n, m in model.named_modules() if isinstance(m, QuantLayer)]
    assert sorted(found.integer if bits <= 8 else found.floating) == sorted(layers)
    assert not (found.floating if bits <= 8 else found.integer)


DROPPED = {
    "blocks.0.attn.qkv": "output_quantizer",
    "blocks.0.attn.qk": "output",
    "blocks.1.sum1": "quantizer",
    "patch_embed.proj": "output_quantizer",
}


@pytest.mark.parametrize(("name", "part"), DROPPED.items(), ids=DROPPED)
def test_a_graph_that_has_lost_a_quantizer_is_noticed(vit: Case, name: str, part: str) -> None:
    model = quantized(vit, "psaq", 8)
    lost = copy.deepcopy(model)
    if part == "quantizer":
        replace_module(lost, name, Sum(LayerRole.PROJ))
    else:
        setattr(lost.get_submodule(name), part, None)
    assert not torch.equal(predict(lost, vit.samples), predict(model, vit.samples))
    # what comes behind it is wrong
    with pytest.raises(ExportError, match=r"^'blocks\.\S+' in onnxruntime differs from torch by"):
        verified(model, onnx_model(lost), "onnxruntime", vit)


SITES = {"matmul": "blocks.1.attn.qk", "total": "blocks.0.sum2", "tokens_layer": "blocks.1.mlp.fc2"}


@pytest.mark.parametrize("runtime", ENGINES)
@pytest.mark.parametrize(("emit", "name"), SITES.items(), ids=SITES)
def test_a_quantized_output_that_takes_other_codes_is_named(
    vit: Case, runtime: str, monkeypatch: pytest.MonkeyPatch, emit: str, name: str
) -> None:
    model = quantized(vit, "psaq", 8)
    graph = onnx_model(model)
    original = getattr(lampq.verify, emit)

    def wrong(g: Any, site: Any, mine: str, *values: str) -> str:
        y = str(original(g, site, mine, *values))
        if mine != name:
            return y
        grid = lampq.verify._opened(copy.deepcopy(site))[1]
        return str(g.node("Add", y, g.number(float(grid.scale)), name="one step off"))

    monkeypatch.setattr(lampq.verify, emit, wrong)
    with pytest.raises(ExportError, match=rf"layer '{name}' in {runtime} differs from torch by"):
        verified(model, graph, runtime, vit)


@pytest.mark.parametrize("runtime", ENGINES)
def test_a_layer_that_falls_back_to_float_is_named(vit: Case, runtime: str) -> None:
    model = quantized(vit, "minmax", 4)
    graph = onnx_model(model)
    for node in graph.graph.node:
        if node.name == "blocks.1.attn.proj/product":
            node.input[0] = "blocks.1.attn.proj/clip"
    onnx.checker.check_model(graph, full_check=True)
    expected = f"layer 'blocks.1.attn.proj' has fallen back to float in {runtime}"
    with pytest.raises(ExportError, match=expected):
        verified(model, graph, runtime, vit)


@pytest.mark.parametrize("runtime", ENGINES)
def test_a_site_that_computes_something_else_is_named(
    vit: Case, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = quantized(vit, "minmax", 4)
    graph = onnx_model(model)
    original = lampq.verify.tokens_layer

    def wrong(g: Any, layer: Any, name: str, x: str) -> str:
        y = original(g, layer, name, x)
        if name != "blocks.0.mlp.fc1":
            return y
        return str(g.node("Mul", y, g.number(1 + 1e-5), name="wrong"))

    monkeypatch.setattr(lampq.verify, "tokens_layer", wrong)
    expected = rf"layer 'blocks.0.mlp.fc1' in {runtime} differs from torch by \S+ of its output"
    with pytest.raises(ExportError, match=expected):
        verified(model, graph, runtime, vit)


def test_other_answers_are_an_error_with_their_share(vit: Case) -> None:
    model = quantized(vit, "minmax", 8)
    content = onnx_model(model).SerializeToString()
    turned = -predict(model, vit.samples)
    nudged = lambda *_: 90.0  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lampq.verify, "_own_agreement", nudged)
        with pytest.raises(ExportError, match=r"on 0\.00 % of 6 images.*with itself.*90\.00 %"):
            verify(model, content, "onnxruntime", vit.samples, turned, any_cpu=True)


def test_a_chaotic_model_may_differ_as_much_as_torch_from_itself(
    vit: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = quantized(vit, "minmax", 8)
    content = onnx_model(model).SerializeToString()
    logits = predict(model, vit.samples)
    monkeypatch.setattr(lampq.verify, "AGREEMENT", 99.0)
    monkeypatch.setattr(lampq.verify, "_share", lambda *_: 82.0)
    monkeypatch.setattr(lampq.verify, "_least", lambda own, images: own)
    monkeypatch.setattr(lampq.verify, "_own_agreement", lambda *_: 84.0)
    with pytest.raises(ExportError, match=r"agrees with torch on 82\.00 % of 6 images"):
        verify(model, content, "onnxruntime", vit.samples, logits, any_cpu=True)
    monkeypatch.setattr(lampq.verify, "_own_agreement", lambda *_: 80.0)
    found = verify(model, content, "onnxruntime", vit.samples, logits, any_cpu=True)
    assert (found.agreement, found.own_agreement) == (82.0, 80.0)


def test_torch_is_compared_with_itself_in_double_precision(vit: Case) -> None:
    model = quantized(vit, "minmax", 8)
    logits = copy.deepcopy(model).double()(vit.samples.images.double())
    assert lampq.verify._own_agreement(model, vit.samples, logits, Progress()) == 100.0
    logits[:3] = -logits[:3]
    assert lampq.verify._own_agreement(model, vit.samples, logits, Progress()) == 50.0
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_what_is_as_good_as_torch_itself_depends_on_the_number_of_images() -> None:
    assert lampq.verify._least(80.0, 10**8) == pytest.approx(80.0, abs=0.02)
    # the deviation of a difference of two shares of 0.8 among 200 is 0.04
    # 161 of 202 answers: 3 * sqrt(2 * 0.79703 * 0.20297 / 200) is 0.120667
    assert lampq.verify._least(80.0, 200) == pytest.approx(80.0 - 12.0667, abs=1e-3)


def test_one_of_a_few_images_may_differ_where_torch_agrees_with_itself_on_all() -> None:
    assert lampq.verify._least(100.0, 24) < 100 * 23 / 24
    assert lampq.verify._least(100.0, 24) > 80
    # many images leave less to chance
    assert lampq.verify._least(100.0, 2000) > 99.5


@pytest.mark.parametrize("runtime", ENGINES)
def test_a_wrong_piece_between_the_layers_is_named(vit: Case, runtime: str) -> None:
    model = quantized(vit, "minmax", 4)
    graph = onnx_model(model)
    for node in graph.graph.node:
        if node.name == "blocks.1.sum1/total":  # a residual from the wrong place
            node.input[0] = "blocks.1.norm1"
    with pytest.raises(ExportError, match=rf"'blocks.1' in {runtime} differs from torch by"):
        verified(model, graph, runtime, vit)


GRIDS: dict[str, tuple[Quantizer, float, float]] = {
    "uniform": (UniformQuantizer(4, torch.tensor(0.2), torch.tensor(6.3)), -2.0, 2.5),
    "eight bits": (UniformQuantizer(8, torch.tensor(0.01), torch.tensor(100.0)), -2.0, 2.5),
    "log": (
        LogQuantizer(4, torch.tensor(2.0), torch.tensor([0.17]), torch.tensor([0.0]), step=12),
        -0.17,
        2.5,
    ),
    "twin": (TwinGeluQuantizer.reaching(4, torch.tensor(0.17), torch.tensor(0.3)), -0.17, 2.5),
    "softmax": (TwinSoftmaxQuantizer.splitting(4, torch.tensor(0.2)), 0.0, 1.0),
}


@pytest.mark.parametrize("name", GRIDS)
def test_inputs_are_moved_off_borders_and_no_further(name: str) -> None:
    grid, low, high = GRIDS[name]
    x = torch.linspace(low, high, 20_001)
    moved = off_borders(grid, x)
    for factor in (1 - 1e-6, 1 + 1e-6):
        assert torch.equal(grid.encode(moved * factor), grid.encode(moved))
    changed = moved != x
    assert 0 < float(changed.float().mean()) < 0.1
    assert float((moved - x).abs().max()) <= 0.02
    assert torch.equal(off_borders(None, x), x)


@pytest.mark.parametrize("clip", [0.1, 0.3, 0.77, 1.0])
@pytest.mark.parametrize("bits", [1, 3, 8])
@pytest.mark.parametrize("axis", [-1, -2])
def test_tokens_are_moved_off_the_borders_of_their_own_grids(
    bits: int, clip: float, axis: int
) -> None:
    grid = TokenQuantizer(bits, torch.tensor(clip), axis=axis)
    x = torch.randn(500, 500, generator=torch.Generator().manual_seed(0))
    moved = off_borders(grid, x)
    fixed = grid.at(moved)
    near = 0.005 * fixed.scale
    assert torch.equal(fixed.encode(moved - near), fixed.encode(moved + near))
    changed = (moved != x).float().mean()
    assert 0 < float(changed) < 0.1
    assert torch.equal(fixed.scale, grid.at(x).scale)
    assert bool(((moved - x).abs() <= 0.021 * fixed.scale).all())


@pytest.mark.parametrize("clip", [0.3, 1.0])
@pytest.mark.parametrize("bits", [1, 3, 8])
def test_tokens_are_moved_off_the_borders_of_their_own_powers(bits: int, clip: float) -> None:
    grid = TokenLogQuantizer(bits, torch.tensor([clip]), torch.tensor([0.17]), step=30)
    x = torch.randn(500, 500, generator=torch.Generator().manual_seed(0)).abs() - 0.17
    moved = off_borders(grid, x)
    fixed = grid.at(moved)
    near = 0.002 * (moved + 0.17)
    assert torch.equal(fixed.encode(moved - near), fixed.encode(moved + near))
    assert 0 < float((moved != x).float().mean()) < 0.2
    assert torch.equal(fixed.scale, grid.at(x).scale)


def test_products_are_verified_too(vit: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantized(vit, "adalog", 4)
    assert any(isinstance(m, QuantMatMul) for m in model.modules())
    original = lampq.verify.matmul

    def wrong(g: Any, site: Any, name: str, a: str, b: str) -> str:
        y = original(g, site, name, a, b)
        if name != "blocks.1.attn.av":
            return y
        return str(g.node("Add", y, g.number(float("nan")), name="wrong"))

    monkeypatch.setattr(lampq.verify, "matmul", wrong)
    with pytest.raises(ExportError, match=r"layer 'blocks\.1\.attn\.av' in onnxruntime differs"):
        verified(model, onnx_model(model), "onnxruntime", vit)


def test_an_unsplit_layer_is_caught_where_products_overflow(vit: Case) -> None:
    """On processors without 8-bit dot products the short form of an 8-bit layer is wrong."""
    model = quantized(vit, "minmax", 8)
    graph = onnx_model(model, any_cpu=False)
    logits = predict(model, vit.samples)
    short = {n.name for n in graph.graph.node if n.name.endswith("product_low")}
    assert not short
    for runtime in ENGINES:
        arguments = (model, graph.SerializeToString(), runtime, vit.samples, logits)
        if lampq.runtime.overflows(runtime):
            with pytest.raises(ExportError, match="differs from torch by"):
                verify(*arguments, any_cpu=False)
        else:
            assert verify(*arguments, any_cpu=False).error <= 1e-6


def test_split_layers_are_in_the_graph_for_any_processor(vit: Case) -> None:
    graph = onnx_model(quantized(vit, "minmax", 8))
    names = {node.name for node in graph.graph.node}
    assert "blocks.0.attn.qkv/product_low" in names
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in graph.graph.initializer}
    for name, values in weights.items():
        if name.endswith((".weight", ".weight_low")) and values.dtype == np.int8:
            assert np.abs(values.astype(int)).max() <= 64
