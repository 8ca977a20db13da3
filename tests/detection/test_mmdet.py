"""Checkpoints of the published detectors, against a second writing of these detectors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from published import CLASSES, STDS, Reference, decoded, pooled
from torch import Tensor
from torchvision.models.detection.image_list import ImageList

from lampq.detection.mmdet import (
    key_table,
    load_mmdet_state,
    mmdet_state,
    names_in,
    options_in,
)
from lampq.detection.models import Detector
from lampq.detection.options import DetectorOptions
from lampq.detection.weights import load_detector
from lampq.errors import FormatError

KINDS: dict[str, dict[str, Any]] = {
    "layers": {"names": "layers"},
    "stages": {"names": "stages"},
    "cascade": {"names": "layers", "cascade": True, "convs": 2},
    "agnostic": {"names": "stages", "cascade": True, "agnostic": True},
}
NAME = "swin_tiny_patch4_window7_224"  # the nearest one
SMALL = {"min_size": 64, "max_size": 96}
Pair = tuple[Reference, Detector]


def _pair(kind: str) -> Pair:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        reference = Reference(**KINDS[kind])
        state = reference.state_dict()
        model = Detector(DetectorOptions.from_json({**options_in(state, "test"), **SMALL})).eval()
    load_mmdet_state(model, state, "test")
    return reference, model


@pytest.fixture(scope="module")
def pairs() -> dict[str, Pair]:
    return {kind: _pair(kind) for kind in KINDS}


def _image(rows: int, columns: int) -> Tensor:
    return torch.randn(1, 3, rows, columns, generator=torch.Generator().manual_seed(3))


BOXES = torch.tensor(
    [[3.0, 5.0, 40.0, 31.0], [-9.0, 2.0, 160.0, 122.0], [50.0, 40.0, 75.0, 63.0], [0, 0, 300, 280]]
)


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_has_one_place_and_every_place_one_key(pairs: dict[str, Pair], kind: str) -> None:
    reference, model = pairs[kind]
    table = key_table(model, names_in(reference.state_dict()))
    assert {entry.source for entry in table} == set(reference.state_dict())
    targets = [entry.target for entry in table if entry.change != "compared"]
    assert sorted(targets) == sorted(model.state_dict())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(64, 96), (52, 76)], ids=["whole", "padded"])
@torch.no_grad()
def test_stages_and_pyramid_are_those_of_the_published_detector(
    pairs: dict[str, Pair], kind: str, size: tuple[int, int]
) -> None:
    reference, model = pairs[kind]
    image = _image(*size)
    outputs = zip(model.backbone.stage_outputs(image), reference.backbone(image), strict=True)
    for mine, expected in outputs:
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)
    levels = zip(model.backbone(image).values(), reference.levels(image), strict=True)
    for mine, expected in levels:
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_merged_patches_in_the_wrong_order_are_another_function(pairs: dict[str, Pair]) -> None:
    reference, _ = pairs["stages"]
    model = _pair("stages")[1]
    wrong = reference.backbone.stages[0].downsample.reduction.weight
    model.backbone.layers[1].downsample.reduction.weight.copy_(wrong)
    image = _image(64, 64)
    difference = model.backbone.stage_outputs(image)[1] - reference.backbone(image)[1]
    assert float(difference.abs().max()) > 0.01


@torch.no_grad()
def test_proposals_are_those_of_the_published_detector(pairs: dict[str, Pair]) -> None:
    reference, model = pairs["layers"]
    image = _image(64, 96)
    levels = reference.levels(image)
    scores, boxes = reference.proposals(levels)
    features = dict(zip("0123p", levels, strict=True))
    anchors = model.rpn.anchor_generator(ImageList(image, [(64, 96)]), levels)
    objectness, deltas = model.rpn.head(levels)
    flat = [x.permute(0, 2, 3, 1).reshape(-1) for x in objectness]
    torch.testing.assert_close(torch.cat(flat), scores, rtol=1e-4, atol=1e-5)
    moves = torch.cat([x.permute(0, 2, 3, 1).reshape(-1, 4) for x in deltas])
    mine = model.rpn.box_coder.decode(moves, anchors)[:, 0]
    torch.testing.assert_close(mine, boxes, rtol=1e-4, atol=1e-3)
    found, _ = model.rpn(ImageList(image, [(64, 96)]), features)
    limits = torch.tensor([96.0, 64.0, 96.0, 64.0])
    clipped = boxes.clamp(min=0).minimum(limits)
    inside = (clipped[:, 2:] > clipped[:, :2]).all(1)  # the others are left out
    best = clipped[inside][scores[inside].argmax()]
    torch.testing.assert_close(found[0][0], best, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("size", [7, 14], ids=["box", "mask"])
@torch.no_grad()
def test_regions_are_pooled_from_the_published_level_at_its_stride(
    pairs: dict[str, Pair], size: int
) -> None:
    reference, model = pairs["layers"]
    levels = reference.levels(_image(128, 160))
    pool = model.roi_heads.box_roi_pool if size == 7 else model.roi_heads.mask_roi_pool
    mine = pool(dict(zip("0123p", levels, strict=True)), [BOXES], [(128, 160)])
    assert len(set(pool.levels(BOXES).tolist())) > 1
    for region, box in zip(mine, BOXES, strict=True):
        torch.testing.assert_close(region, pooled(levels, box, size), rtol=1e-4, atol=1e-5)


def _maps(size: int) -> Tensor:
    return torch.randn(5, 8, size, size, generator=torch.Generator().manual_seed(4))


def _stage(model: Detector, number: int) -> Any:
    return model.roi_heads.stages[number] if model.options.cascade else model.roi_heads


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_heads_say_the_same_of_a_region(pairs: dict[str, Pair], kind: str) -> None:
    reference, model = pairs[kind]
    for number in range(model.options.stages):
        stage = _stage(model, number)
        box, mask = reference.roi_head.bbox_head, reference.roi_head.mask_head
        if model.options.cascade:
            box, mask = box[number], mask[number]
        logits, deltas = stage.box_predictor(stage.box_head(_maps(7)))
        expected, moves = box(_maps(7))
        # background first instead of last
        torch.testing.assert_close(logits[:, 0], expected[:, -1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(logits[:, 1:], expected[:, :-1], rtol=1e-4, atol=1e-5)
        mine = deltas.view(5, CLASSES + 1, 4)[:, 1:]
        torch.testing.assert_close(mine, moves, rtol=1e-4, atol=1e-5)
        masks = stage.mask_predictor(stage.mask_head(_maps(14)))[:, 1:]
        torch.testing.assert_close(masks, mask(_maps(14)), rtol=1e-4, atol=1e-5)
        start = BOXES[:1].expand(5, 4)
        boxes = stage.box_coder.decode(deltas, [start])[:, 2]
        torch.testing.assert_close(boxes, decoded(start, moves[:, 1], STDS[number]))


@pytest.mark.parametrize("kind", ["cascade", "agnostic"])
@torch.no_grad()
def test_a_cascade_refines_boxes_and_averages_its_stages(pairs: dict[str, Pair], kind: str) -> None:
    reference, model = pairs[kind]
    levels = reference.levels(_image(64, 96))
    shape = (64, 96)
    limits = torch.tensor([96.0, 64.0, 96.0, 64.0])
    boxes, every = BOXES[[0, 2]].clamp(min=0).minimum(limits), []
    start = boxes
    for number, head in enumerate(reference.roi_head.bbox_head):
        logits, deltas = head(torch.stack([pooled(levels, box, 7) for box in boxes]))
        every.append(logits)
        if number < 2:
            chosen = deltas[torch.arange(len(boxes)), logits[:, :-1].argmax(1)]
            boxes = decoded(boxes, chosen, STDS[number]).clamp(min=0).minimum(limits)
    scores = torch.stack(every).mean(0).softmax(1)[:, :-1]
    last = [decoded(boxes, deltas[:, c], STDS[2]).clamp(min=0).minimum(limits) for c in range(3)]
    for stage in model.roi_heads.stages:
        stage.score_thresh, stage.nms_thresh = -1.0, 1.1
    found, losses = model.roi_heads(dict(zip("0123p", levels, strict=True)), [start], [shape])
    assert losses == {}
    expected = torch.stack(last, dim=1).flatten(0, 1)
    there = (expected[:, 2:] > expected[:, :2]).all(1)  # the others are left out
    order = torch.where(there, scores.flatten(), -1.0).argsort(descending=True)[: there.sum()]
    assert len(order) >= CLASSES
    expected, ranked = expected[order], scores.flatten()[order]
    torch.testing.assert_close(found[0]["scores"], ranked, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[0]["boxes"], expected, rtol=1e-4, atol=1e-3)
    best = expected[0]
    label = int(order[0]) % CLASSES
    masks = [
        head(pooled(levels, best, 14)[None])[0, label].sigmoid()
        for head in reference.roi_head.mask_head
    ]
    torch.testing.assert_close(
        found[0]["masks"][0, 0], torch.stack(masks).mean(0), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_detector_comes_back_from_its_own_checkpoint(kind: str, tmp_path: Path) -> None:
    reference, model = _pair(kind)
    names = names_in(reference.state_dict())
    state = mmdet_state(model, names)
    for key, values in reference.state_dict().items():
        assert torch.equal(state[key], values), key
    path = tmp_path / "detector.pth"
    torch.save({"meta": {"epoch": 12}, "state_dict": state}, path)
    again = load_detector(NAME, path, **SMALL)
    assert again.options == model.options
    assert not again.training
    for key, values in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], values), key


def _without(key: str) -> Any:
    return lambda state: state.pop(key)


def _with(key: str, values: Tensor) -> Any:
    return lambda state: state.update({key: values})


QKV = "backbone.layers.1.blocks.0.attn.qkv.weight"
INDEX = "backbone.layers.0.blocks.1.attn.relative_position_index"


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (_without(QKV), f"key '{QKV}' of the detector is missing"),
        (_without("neck.lateral_convs.0.conv.weight"), "'neck.lateral_convs.0.conv.weight' of a"),
        (
            _with("semantic_head.conv.weight", torch.zeros(1)),
            "'semantic_head.conv.weight' is in no",
        ),
        (
            _with(QKV, torch.zeros(48, 15)),
            f"key '{QKV}' has shape (48, 15), the detector needs (48, 16)",
        ),
        (_with(QKV, torch.full((48, 16), torch.nan)), "NaN"),
        (
            _with(INDEX, torch.zeros(16, 16, dtype=torch.long)),
            f"key '{INDEX}' has relative positions",
        ),
        (_with("roi_head.bbox_head.fc_reg.weight", torch.zeros(8, 12)), "has shape (8, 12)"),
    ],
    ids=["missing", "needed-first", "unknown", "shape", "nan", "index", "deltas"],
)
def test_the_first_key_that_does_not_fit_is_named(harm: Any, says: str, tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        state = Reference("layers").state_dict()
    harm(state)
    path = tmp_path / "detector.pth"
    torch.save({"state_dict": state}, path)
    with pytest.raises(FormatError, match=re.escape(says)):
        load_detector(NAME, path)


def test_a_checkpoint_with_code_in_it_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "detector.pth"
    torch.save({"state_dict": {}, "meta": Path("x")}, path)
    with pytest.raises(FormatError, match="more than tensors"):
        load_detector(NAME, path)


PARTS = r"\.(weight|bias|running_mean|running_var|num_batches_tracked)$"


def _pattern(key: str) -> str:
    """A key without the name of its tensor, every number a star."""
    return re.sub(r"(?<=[.m])\d+(?=\.|$)", "*", re.sub(PARTS, "", key))


def test_the_page_shows_every_key(pairs: dict[str, Pair]) -> None:
    page = Path(__file__).parents[2] / "docs/detection.md"
    rows = re.findall(
        r"^\| `([\w.*]+)` \| `([\w.*]+)` \| ([\w ]+) \|$", page.read_text(encoding="utf-8"), re.M
    )
    made = set()
    for reference, model in pairs.values():
        for entry in key_table(model, names_in(reference.state_dict())):
            made.add((_pattern(entry.source), _pattern(entry.target), entry.change))
    assert made == set(rows)
