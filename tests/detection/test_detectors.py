"""Detectors: what they take, what they give, and what they lose."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from lampq.detection.models import Detector, detection_losses, detector
from lampq.detection.options import DetectorOptions
from lampq.errors import ConfigError
from lampq.graph.attention import ExplicitWindowAttention, explicit
from lampq.graph.discover import discover, verify_norms
from lampq.types import SEARCHED_ROLES

SMALL: dict[str, Any] = {
    "embed_dim": 12,
    "depths": (2, 2),
    "num_heads": (2, 2),
    "fpn_channels": 8,
    "anchor_sizes": (16, 32, 64),
    "box_channels": 16,
    "mask_channels": 8,
    "mask_convs": 1,
    "min_size": 64,
    "max_size": 96,
}
REAL = Path(os.environ.get("LAMPQ_REAL", Path(__file__).parents[3] / "shared"))


def _detector(*, cascade: bool = False, **more: Any) -> Detector:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return detector("scene_swin", classes=3, cascade=cascade, **{**SMALL, **more})


def _images() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(3, 64, 80, generator=generator), torch.rand(3, 70, 50, generator=generator)]


def _target(rows: int, columns: int) -> dict[str, Tensor]:
    masks = torch.zeros(2, rows, columns, dtype=torch.uint8)
    masks[0, 5:30, 4:34] = 1
    masks[1, 20:60, 10:45] = 1
    boxes = torch.tensor([[4.0, 5.0, 34.0, 30.0], [10.0, 20.0, 45.0, 60.0]])
    return {"boxes": boxes, "labels": torch.tensor([1, 3]), "masks": masks}


def _targets() -> list[dict[str, Tensor]]:
    return [_target(*image.shape[1:]) for image in _images()]


@pytest.mark.parametrize("cascade", [False, True], ids=["one-stage", "cascade"])
@torch.no_grad()
def test_detections_have_the_size_of_their_image(cascade: bool) -> None:
    model = _detector(cascade=cascade, score_threshold=0.0, detections=7)
    for image, found in zip(_images(), model(_images()), strict=True):
        rows, columns = image.shape[1:]
        assert set(found) == {"boxes", "labels", "scores", "masks"}
        assert found["masks"].shape == (7, 1, rows, columns)
        assert set(found["labels"].tolist()) <= {1, 2, 3}
        assert bool((found["boxes"] >= 0).all())
        assert bool((found["boxes"][:, 2] <= columns).all())
        assert bool((found["boxes"][:, 3] <= rows).all())
        assert bool((found["scores"].diff() <= 0).all())


@pytest.mark.parametrize("cascade", [False, True], ids=["one-stage", "cascade"])
def test_every_parameter_has_a_part_in_the_losses(cascade: bool) -> None:
    model = _detector(cascade=cascade).train()
    losses = model(_images(), _targets())
    assert len(losses) == (11 if cascade else 5)
    torch.stack(list(losses.values())).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("cascade", [False, True], ids=["one-stage", "cascade"])
def test_a_few_steps_of_training_lower_the_loss(cascade: bool) -> None:
    model = _detector(cascade=cascade).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def loss() -> Tensor:
        losses = detection_losses(model, _images()[:1], _targets()[:1])
        return torch.stack(list(losses.values())).sum()

    before = float(loss().detach())
    for _ in range(20):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert float(loss().detach()) < 0.85 * before


def test_losses_in_evaluation_are_the_same_every_time_and_leave_everything_as_it_was() -> None:
    model = _detector(drop_path=0.5, box_convs=1, box_fcs=1)
    modes = [module.training for module in model.modules()]
    buffers = {name: values.clone() for name, values in model.named_buffers()}
    state = torch.get_rng_state()
    first = detection_losses(model, _images(), _targets())
    second = detection_losses(model, _images(), _targets())
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(value.requires_grad for value in first.values())
    assert [module.training for module in model.modules()] == modes
    assert not any(modes)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(values, buffers[name]) for name, values in model.named_buffers())


def test_another_seed_draws_other_proposals() -> None:
    model = _detector(box_samples=8, rpn_samples=8)
    losses = [detection_losses(model, _images(), _targets(), seed=seed) for seed in (0, 1)]
    assert losses[0]["loss_classifier"] != losses[1]["loss_classifier"]


def test_the_mode_is_back_after_an_error() -> None:
    model = _detector()
    with pytest.raises(KeyError):
        detection_losses(model, _images(), [{}, {}])
    assert not model.training
    assert not model.rpn.training


def test_losses_are_those_of_detectors_only() -> None:
    with pytest.raises(ConfigError, match="not a Linear"):
        detection_losses(nn.Linear(1, 1), _images(), _targets())


def test_an_image_without_objects_has_losses_too() -> None:
    model = _detector(cascade=True)
    empty = {
        "boxes": torch.zeros(0, 4),
        "labels": torch.zeros(0, dtype=torch.long),
        "masks": torch.zeros(0, 64, 80, dtype=torch.uint8),
    }
    losses = detection_losses(model, _images()[:1], [empty])
    assert all(bool(torch.isfinite(value)) for value in losses.values())


@pytest.mark.parametrize("cascade", [False, True], ids=["one-stage", "cascade"])
@torch.no_grad()
def test_the_explicit_form_finds_and_loses_the_same(cascade: bool) -> None:
    model = _detector(cascade=cascade, score_threshold=0.0)
    opened = explicit(model)
    for mine, expected in zip(opened(_images()), model(_images()), strict=True):
        for key, values in expected.items():
            torch.testing.assert_close(mine[key], values, rtol=1e-3, atol=1e-4)
    mine, expected = (detection_losses(m, _images(), _targets()) for m in (opened, model))
    for key, value in expected.items():
        torch.testing.assert_close(mine[key], value, rtol=1e-3, atol=1e-4)


def test_discovery_finds_the_layers_of_every_block_with_their_norms() -> None:
    model = explicit(_detector())
    graph = discover(model)
    blocks = [f"backbone.layers.{i}.blocks.{j}" for i in range(2) for j in range(2)]
    assert graph.blocks == tuple(blocks)
    searched = [layer for layer in graph.layers if layer.role in SEARCHED_ROLES]
    parts = (("attn.qkv", "norm1"), ("attn.proj", None), ("mlp.fc1", "norm2"), ("mlp.fc2", None))
    assert {(layer.name, layer.norm) for layer in searched} == {
        (f"{block}.{part}", f"{block}.{norm}" if norm else None)
        for block in blocks
        for part, norm in parts
    }
    assert len(graph.matmuls) == 2 * len(blocks)
    assert all(
        isinstance(model.get_submodule(f"{b}.attn"), ExplicitWindowAttention) for b in blocks
    )


def test_the_norms_of_padded_maps_can_be_folded() -> None:
    model = explicit(_detector(window_size=7))
    graph = discover(model)

    def levels(some: Any, images: list[Tensor]) -> Tensor:
        return torch.cat([x.flatten() for x in some.backbone(images[0][None]).values()])

    assert verify_norms(model, graph, _images(), levels) == graph


def test_options_are_the_same_after_json() -> None:
    options = _detector(cascade=True).options
    assert DetectorOptions.from_json(json.loads(json.dumps(options.to_json()))) == options


def test_a_detector_is_built_again_from_its_options() -> None:
    model = _detector()
    again = Detector(DetectorOptions.from_json(model.options.to_json()))
    again.load_state_dict(model.state_dict())


def test_the_scene_detector_is_small_enough_to_be_sent_around() -> None:
    parameters = sum(p.numel() for p in detector("scene_swin", classes=10).parameters())
    assert 2 * parameters < 8e6


@pytest.mark.parametrize(
    ("options", "millions"),
    [({}, 48), ({"cascade": True, "box_convs": 4, "box_fcs": 1}, 86)],
    ids=["mask-rcnn", "cascade"],
)
def test_detectors_have_the_published_size(options: dict[str, Any], millions: int) -> None:
    with torch.device("meta"):
        model = detector("swin_tiny_patch4_window7_224", classes=80, **options)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == millions


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("resnet50", {}, "no Swin of timm"),
        ("scene_swin", {"classes": 0}, "at least one class"),
        ("scene_swin", {"sizes": 3}, "no option 'sizes'"),
        ("scene_swin", {"anchor_sizes": (8, 16)}, "4 levels and needs as many"),
        ("scene_swin", {"image_mean": (0.5,)}, "1 channels and image_std 3"),
        ("scene_swin", {"stage_ious": (0.5,)}, "one entry for each stage"),
    ],
    ids=["name", "classes", "unknown", "levels", "channels", "stages"],
)
def test_wrong_options_are_refused_in_a_sentence(
    name: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        detector(name, **{"classes": 3, **options})


def test_options_without_a_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="lack 'name'"):
        DetectorOptions.from_json({"classes": 3})


@torch.no_grad()
def test_grey_pictures_have_one_channel() -> None:
    model = _detector(image_mean=(0.5,), image_std=(0.25,))
    assert len(model([torch.rand(1, 64, 64)])) == 1


@pytest.mark.slow
@torch.no_grad()
def test_a_detector_of_full_size_takes_a_real_picture() -> None:
    pictures = sorted((REAL / "data/coco_mini/val2017").glob("*.jpg"))
    if not pictures:
        pytest.skip(f"no pictures in {REAL}; set LAMPQ_REAL to the folder that has them")
    picture = np.array(Image.open(pictures[0]).convert("RGB"))
    image = torch.from_numpy(picture).permute(2, 0, 1).float() / 255
    model = detector("swin_tiny_patch4_window7_224", classes=80)
    assert min(model.transform([image])[0].image_sizes[0]) in (798, 799, 800)
    found = model([image])[0]
    assert found["masks"].shape[1:] == (1, *image.shape[1:])
