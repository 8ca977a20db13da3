from __future__ import annotations

import copy

import pytest
import timm
import torch
from conftest import Case
from torch import nn

from lampq.graph.attention import explicit
from lampq.graph.rotate import rotate_attention_, rotation


@pytest.mark.parametrize("size", [1, 2, 8, 20, 24, 64])
def test_a_rotation_is_orthogonal(size: int) -> None:
    turn = rotation(size, torch.Generator().manual_seed(0))
    torch.testing.assert_close(turn @ turn.T, torch.eye(size, dtype=torch.float64))


@pytest.mark.parametrize("size", [8, 64])
def test_a_power_of_two_gives_entries_of_equal_size(size: int) -> None:
    turn = rotation(size, torch.Generator().manual_seed(0))
    torch.testing.assert_close(turn.abs(), torch.full_like(turn, size**-0.5))


@torch.no_grad()
def test_rotating_leaves_the_float_result_as_it_is(case: Case) -> None:
    turned = copy.deepcopy(case.model)
    rotate_attention_(turned, seed=3)
    images = case.samples.images
    torch.testing.assert_close(turned(images), case.model(images), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["deit_tiny_distilled_patch16_224", "norms"])
@torch.no_grad()
def test_rotating_is_exact_on_other_families(name: str) -> None:
    torch.manual_seed(0)
    model = explicit(_normed() if name == "norms" else timm.create_model(name, depth=1))
    turned = copy.deepcopy(model)
    rotate_attention_(turned, seed=0)
    images = torch.randn(1, 3, 224, 224)
    torch.testing.assert_close(turned(images), model(images), rtol=1e-3, atol=1e-4)


def _normed() -> nn.Module:
    """A ViT whose queries and keys have norms, and whose qkv has no bias."""
    return timm.models.vision_transformer.VisionTransformer(
        depth=1, embed_dim=48, num_heads=3, qk_norm=True, qkv_bias=False, num_classes=5
    )


@torch.no_grad()
def test_queries_keys_and_values_all_change_and_other_layers_do_not(case: Case) -> None:
    turned = copy.deepcopy(case.model)
    rotate_attention_(turned, seed=0)
    for name, before in case.model.state_dict().items():
        after = turned.state_dict()[name]
        if name.endswith(("qkv.weight", "proj.weight")) and "patch_embed" not in name:
            for old, new in zip(before.chunk(3), after.chunk(3), strict=True):
                assert not torch.allclose(old, new)
        elif not name.endswith("qkv.bias"):
            assert torch.equal(before, after), name


@torch.no_grad()
def test_normed_queries_and_keys_are_left_alone() -> None:
    torch.manual_seed(0)
    model = explicit(_normed())
    before = model.get_submodule("blocks.0.attn.qkv").weight.clone()
    rotate_attention_(model, seed=0)
    after = model.get_submodule("blocks.0.attn.qkv").weight
    assert torch.equal(before[:96], after[:96])
    assert not torch.equal(before[96:], after[96:])


@torch.no_grad()
def test_an_outlier_channel_is_spread_over_its_head(vit: Case) -> None:
    model = copy.deepcopy(vit.model)
    qkv = model.get_submodule("blocks.0.attn.qkv")
    qkv.bias[24:32] = torch.tensor([80.0, 0, 0, 0, 0, 0, 0, 0])
    rotate_attention_(model, seed=0)
    spread = model.get_submodule("blocks.0.attn.qkv").bias[24:32].abs()
    torch.testing.assert_close(spread, torch.full((8,), 80 / 8**0.5))
