from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from conftest import Case
from safetensors.torch import load_file
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor, nn

from lampq.errors import GraphError
from lampq.graph.attention import explicit
from lampq.graph.discover import discover, missing_roles, verify_norms, verify_prefix
from lampq.graph.families import TIMM, RolePattern
from lampq.types import SEARCHED_ROLES, LayerRole


def test_each_block_has_its_four_layers_in_order(case: Case) -> None:
    for number, block in enumerate(case.graph.blocks):
        layers = [layer for layer in case.graph.layers if layer.block == number]
        assert [layer.role for layer in layers] == list(SEARCHED_ROLES)
        assert all(layer.name.startswith(f"{block}.") for layer in layers)


@pytest.mark.parametrize(
    ("name", "fixed"),
    [
        ("vit", {"patch_embed.proj": "patch_embed", "head": "head"}),
        (
            "swin",
            {
                "patch_embed.proj": "patch_embed",
                "layers.1.downsample.reduction": "reduction",
                "head.fc": "head",
            },
        ),
    ],
)
def test_layers_outside_the_blocks_have_their_roles(
    request: pytest.FixtureRequest, name: str, fixed: dict[str, str]
) -> None:
    graph = request.getfixturevalue(name).graph
    assert {layer.name: layer.role.value for layer in graph.fixed} == fixed
    assert {layer.block for layer in graph.fixed} == {-1}


def test_layers_are_listed_in_the_order_they_run(case: Case) -> None:
    order: list[str] = []
    model = copy.deepcopy(case.model)
    for layer in case.graph.layers:
        model.get_submodule(layer.name).register_forward_pre_hook(
            lambda *_, name=layer.name: order.append(name)
        )
    model(case.samples.images[:1])
    assert [layer.name for layer in case.graph.layers] == order


def test_parameters_are_counted_without_biases(case: Case) -> None:
    for layer in case.graph.layers:
        assert layer.n_params == case.model.get_submodule(layer.name).weight.numel()


def test_qkv_and_fc1_are_fed_by_the_norms_of_their_block(vit: Case) -> None:
    norms = {layer.name: layer.norm for layer in vit.graph.layers if layer.norm is not None}
    assert norms == {
        f"blocks.{i}.{layer}": f"blocks.{i}.{norm}"
        for i in range(2)
        for layer, norm in (("attn.qkv", "norm1"), ("mlp.fc1", "norm2"))
    }


def test_the_reduction_of_swin_is_fed_by_its_own_norm(swin: Case) -> None:
    layer = swin.graph.layer("layers.1.downsample.reduction")
    assert layer.norm == "layers.1.downsample.norm"


def test_matmuls_belong_to_the_block_they_are_in(case: Case) -> None:
    found = [(site.name, site.kind, site.block) for site in case.graph.matmuls]
    assert found == [
        (f"{block}.attn.{kind}", kind, number)
        for number, block in enumerate(case.graph.blocks)
        for kind in ("qk", "av")
    ]


def test_a_model_in_its_original_form_has_no_matmuls(vit: Case) -> None:
    graph = discover(vit.original)
    assert graph.matmuls == ()
    assert graph.layers == vit.graph.layers


def test_a_model_that_matches_nothing_is_refused_with_what_it_has() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    with pytest.raises(GraphError, match=r"Sequential with 2 linear .* \(0, 2\)"):
        discover(model)


def test_a_model_with_a_head_only_is_refused() -> None:
    model = nn.Sequential()
    model.add_module("head", nn.Linear(2, 2))
    with pytest.raises(GraphError, match=r"\*\.attn\.qkv"):
        discover(model)


class _Layer(nn.Module):
    """A block of a model that timm does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(4)
        self.up = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.up(self.ln(x))[..., :4]
        return y


def test_patterns_of_a_user_find_the_layers_of_their_model() -> None:
    model = nn.Sequential()
    model.add_module("body", nn.Sequential(_Layer(), _Layer()))
    graph = discover(model, (RolePattern("*.up", LayerRole.FC1, norm="ln"),))
    assert [(layer.name, layer.norm) for layer in graph.layers] == [
        ("body.0.up", "body.0.ln"),
        ("body.1.up", "body.1.ln"),
    ]
    assert graph.blocks == ("body.0", "body.1")


def test_roles_no_layer_plays_are_listed() -> None:
    graph = discover(nn.Sequential(_Layer()), (RolePattern("*.up", LayerRole.FC1, norm="ln"),))
    assert missing_roles(graph) == (LayerRole.QKV, LayerRole.PROJ, LayerRole.FC2)


def test_a_vit_plays_every_searched_role(vit: Case) -> None:
    assert missing_roles(vit.graph) == ()


def test_overlapping_patterns_are_refused_with_the_layer(vit: Case) -> None:
    with pytest.raises(GraphError, match=r"'blocks\.0\.attn\.qkv' more than once"):
        discover(vit.model, (*TIMM, RolePattern("blocks.*.attn.qkv", LayerRole.QKV)))


@pytest.mark.parametrize(
    ("pattern", "name", "block"),
    [
        ("*.attn.qkv", "blocks.0.attn.qkv", "blocks.0"),
        ("*.attn.qkv", "layers.1.blocks.0.attn.qkv", "layers.1.blocks.0"),
        ("*.attn.qkv", "attn.qkv", None),
        ("*.attn.qkv", "blocks.0.attn.qkv.extra", None),
        ("*.attn.qkv", "blocks.0.attnxqkv", None),
        ("head", "head", ""),
        ("head", "my.head", None),
        ("body.*.mlp.*.up", "body.3.mlp.1.up", "body.3.mlp.1"),
    ],
)
def test_a_pattern_names_the_block_up_to_its_last_star(
    pattern: str, name: str, block: str | None
) -> None:
    assert RolePattern(pattern, LayerRole.QKV).match(name) == block


@pytest.mark.parametrize(
    "options",
    [{"padding": 1}, {"stride": 2}, {"groups": 3}],
    ids=["padded", "overlapping", "grouped"],
)
def test_a_convolution_that_is_no_patch_embedding_is_left_out(
    vit: Case, options: dict[str, int]
) -> None:
    model = copy.deepcopy(vit.model)
    arguments = {"kernel_size": 8, "stride": 8, **options}
    model.patch_embed.proj = nn.Conv2d(3, 24, **arguments)
    assert "patch_embed.proj" not in [layer.name for layer in discover(model).layers]


@pytest.mark.parametrize(
    "norm",
    [
        nn.RMSNorm(24),
        nn.LayerNorm(24, elementwise_affine=False),
        nn.LayerNorm(24, bias=False),
        nn.Identity(),
    ],
    ids=["rms", "not-affine", "no-bias", "identity"],
)
def test_only_an_affine_layer_norm_is_named(vit: Case, norm: nn.Module) -> None:
    model = copy.deepcopy(vit.model)
    model.blocks[0].norm1 = norm
    graph = discover(model)
    assert graph.layer("blocks.0.attn.qkv").norm is None
    assert graph.layer("blocks.0.mlp.fc1").norm == "blocks.0.norm2"


def test_norms_with_one_consumer_are_kept(case: Case) -> None:
    assert verify_norms(case.model, case.graph, case.samples.images) == case.graph


class _TwoConsumers(nn.Module):
    """A block whose first norm feeds the attention and is added to the residual as well."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.norm1, self.attn = block.norm1, block.attn
        self.norm2, self.mlp = block.norm2, block.mlp

    def forward(self, x: Tensor, **_named: object) -> Tensor:
        normed = self.norm1(x)
        x = normed + self.attn(normed)
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


def test_a_norm_with_a_second_consumer_is_dropped_and_the_others_kept(vit: Case) -> None:
    model = copy.deepcopy(vit.model)
    model.blocks[0] = _TwoConsumers(model.blocks[0])
    graph = discover(model)
    assert graph.layer("blocks.0.attn.qkv").norm == "blocks.0.norm1"
    verified = verify_norms(model, graph, vit.samples.images)
    expected = tuple(
        replace(layer, norm=None) if layer.name == "blocks.0.attn.qkv" else layer
        for layer in graph.layers
    )
    assert verified.layers == expected


def test_a_norm_whose_output_is_padded_into_windows_is_dropped() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # ten by ten patches in windows of seven: padded to fourteen by fourteen
        model = explicit(
            SwinTransformer(
                img_size=20,
                patch_size=2,
                window_size=7,
                embed_dim=16,
                depths=(1,),
                num_heads=(2,),
                num_classes=10,
            )
        )
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.2)
        example = torch.randn(2, 3, 20, 20)
    verified = verify_norms(model, discover(model), example)
    assert verified.layer("layers.0.blocks.0.attn.qkv").norm is None
    assert verified.layer("layers.0.blocks.0.mlp.fc1").norm == "layers.0.blocks.0.norm2"


def test_verifying_leaves_the_model_alone(vit: Case) -> None:
    before = copy.deepcopy(vit.model.state_dict())
    verify_norms(vit.model, vit.graph, vit.samples.images)
    assert all(torch.equal(vit.model.state_dict()[name], t) for name, t in before.items())


@torch.no_grad()
def test_all_norms_of_a_trained_vit_are_kept(real: Path) -> None:
    original = timm.create_model("vit_tiny_patch16_224", pretrained=False).eval()
    original.load_state_dict(load_file(real / "weights" / "vit_tiny_patch16_224.safetensors"))
    model = explicit(original)
    graph = discover(model)
    example = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    verified = verify_norms(model, graph, example)
    assert len([layer for layer in verified.layers if layer.norm is not None]) == 24


class _Maps(nn.Module):
    """Says that it has a class token, and has maps of patches."""

    num_prefix_tokens = 1

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"mlp": _Mlp()})])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block["mlp"](x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return x.mean(dim=(2, 3))


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(3, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x))


def test_a_prefix_is_dropped_where_there_is_no_row_of_tokens() -> None:
    model = _Maps()
    graph = discover(model)
    assert {layer.prefix for layer in graph.layers} == {1}
    found = verify_prefix(model, graph, torch.zeros(2, 3, 4, 4))
    assert {layer.prefix for layer in found.layers} == {0}
