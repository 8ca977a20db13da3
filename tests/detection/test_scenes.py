"""Scenes are the same for the same seed, and their masks and boxes are exact."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch

from lampq.detection.scenes import (
    NAMES,
    Items,
    SceneStyle,
    bundled_items,
    bundled_scenes,
    make_scenes,
    scenes,
)
from lampq.errors import DataError


@pytest.fixture(scope="module")
def items() -> Items:
    return bundled_items("calib")


def test_a_scene_depends_on_the_seed_and_its_number_alone(items: Items) -> None:
    four, again, other = (make_scenes(items, 4, seed) for seed in (5, 5, 6))
    assert all(map(torch.equal, four.images, again.images))
    assert not torch.equal(four.images[0], other.images[0])
    assert [o.masks for o in four.objects] == [o.masks for o in again.objects]
    third, _ = next(scenes(items, 5, first=2))
    assert torch.equal(third, four.images[2])


def test_boxes_and_areas_are_those_of_masks_that_do_not_overlap(items: Items) -> None:
    for objects in make_scenes(items, 8, 0).objects:
        masks = np.stack([mask.pixels() for mask in objects.masks])
        assert masks.sum(0).max() == 1
        for mask, box, area in zip(masks, objects.boxes.tolist(), objects.area, strict=True):
            rows, columns = np.nonzero(mask)
            assert box == [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            assert mask.sum() == area > 0


def test_what_is_in_front_hides_what_is_behind() -> None:
    # white squares: every item is 20 pixels wide, so a box with a smaller area is partly hidden
    squares = Items(np.full((1, 28, 28), 255, np.uint8), np.array([3]))
    style = SceneStyle(size=64, items=(6, 6), clutter=(0, 0), edge=(20, 20), visible=0.3)
    made = make_scenes(squares, 6, 0, style)
    areas = torch.cat([objects.area for objects in made.objects])
    assert (areas < 400).any()
    assert (areas >= 0.3 * 400).all()
    assert areas.max() == 400


def test_clutter_is_no_object() -> None:
    squares = Items(np.full((1, 28, 28), 255, np.uint8), np.array([3]))
    bare, full = (
        make_scenes(squares, 5, 0, SceneStyle(size=64, items=(1, 1), clutter=c, edge=(20, 20)))
        for c in ((0, 0), (6, 6))
    )
    assert [len(o) for o in bare.objects] == [len(o) for o in full.objects] == [1] * 5
    assert not torch.equal(bare.images[0], full.images[0])


def test_every_scene_has_an_object_of_a_known_class(items: Items) -> None:
    made = make_scenes(items, 20, 1)
    assert min(len(objects) for objects in made.objects) >= 1
    assert {image.shape for image in made.images} == {(3, 128, 128)}
    labels = torch.cat([objects.labels for objects in made.objects])
    assert set(labels.tolist()) <= set(range(1, len(NAMES) + 1))


def test_labels_are_the_classes_of_the_items_from_one(items: Items) -> None:
    bags = items.labels == NAMES.index("bag")
    only = Items(items.images[bags], items.labels[bags])
    made = make_scenes(only, 2, 0)
    assert {made.names[label - 1] for o in made.objects for label in o.labels.tolist()} == {"bag"}


def test_scenes_of_the_two_splits_have_no_common_item() -> None:
    calib, evaluation = bundled_items("calib"), bundled_items("eval")
    seen = {image.tobytes() for image in calib.images}
    assert sum(image.tobytes() in seen for image in evaluation.images) == 0
    assert len(bundled_scenes("eval", 2)) == 2


def test_an_impossible_style_or_item_is_refused(items: Items) -> None:
    with pytest.raises(DataError, match="do not fit"):
        SceneStyle(size=32, edge=(20, 40))
    with pytest.raises(DataError, match="no scene has"):
        SceneStyle(items=(0, 3))
    with pytest.raises(DataError, match="bytes"):
        Items(items.images.astype(float), items.labels)
    with pytest.raises(DataError, match="as many classes"):
        Items(items.images, items.labels[:3])
    with pytest.raises(DataError, match="at least 1"):
        make_scenes(items, 0, 0)


def test_more_scenes_can_always_be_had(items: Items) -> None:
    assert len(list(islice(scenes(items, 0), 3))) == 3
