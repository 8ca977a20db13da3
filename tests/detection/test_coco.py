"""COCO's files are read whole, and what is wrong with one is said in a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lampq.detection.coco import read_coco, write_coco
from lampq.detection.rle import Mask
from lampq.detection.samples import DetectionSamples, Objects
from lampq.errors import DataError

SQUARE = Mask.of(np.pad(np.ones((4, 5)), ((2, 4), (1, 6))))  # of a picture of 10 x 12


def small() -> DetectionSamples:
    """Three pictures of two sizes; the last is empty, the second has a crowd."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((10, 12), (10, 12), (8, 6))
    one = Objects.of([SQUARE], [2])
    two = Objects.of([SQUARE, SQUARE], [1, 2])
    crowd = Objects(two.boxes, two.labels, two.masks, torch.tensor([0, 1]), two.area)
    return DetectionSamples(
        tuple(torch.randint(0, 256, (3, *s), generator=generator).byte() for s in sizes),
        (one, crowd, Objects.of([], [])),
        sizes,
        (4, 7, 9),
        (10, 30),
        ("cat", "dog"),
    )


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """The three pictures as a folder of COCO."""
    write_coco(small(), tmp_path)
    return tmp_path


def read(folder: Path, **options: Any) -> DetectionSamples:
    return read_coco(folder / "annotations.json", folder / "images", **options)


def test_samples_come_back_from_their_files(written: Path) -> None:
    before, after = small(), read(written)
    assert (after.image_ids, after.category_ids, after.names) == (
        (4, 7, 9),
        (10, 30),
        ("cat", "dog"),
    )
    assert after.sizes == before.sizes
    for one, other in zip(before.objects, after.objects, strict=True):
        assert one.masks == other.masks
        for field in ("boxes", "labels", "iscrowd", "area"):
            assert torch.equal(getattr(one, field), getattr(other, field))
    for image, other in zip(before.images, after.images, strict=True):
        assert torch.equal(image, other)


def test_labels_are_numbered_from_one_in_the_order_of_category_ids(written: Path) -> None:
    assert read(written).objects[0].labels.tolist() == [2]


def test_targets_leave_crowds_out_and_have_masks_of_the_picture() -> None:
    targets = small().targets(slice(0, 3))
    assert [len(t["labels"]) for t in targets] == [1, 1, 0]
    assert [tuple(t["masks"].shape) for t in targets] == [(1, 10, 12), (1, 10, 12), (0, 8, 6)]
    assert targets[0]["boxes"].tolist() == [[1, 2, 6, 6]]
    assert targets[0]["masks"].sum() == 20


def test_batches_have_every_picture_once_from_zero_to_one() -> None:
    batches = list(small().batches(2))
    assert [len(images) for images, _ in batches] == [2, 1]
    assert torch.equal(batches[1][0][0], small().images[2].float() / 255)


def test_a_split_has_no_common_picture_and_a_subset_is_seeded(written: Path) -> None:
    samples = read(written)
    first, second = samples.split(1, seed=0)
    assert sorted(first.image_ids + second.image_ids) == [4, 7, 9]
    assert len(second) == 1
    assert samples.subset(2, 3).image_ids == samples.subset(2, 3).image_ids
    assert len(read(written, limit=2)) == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c.pop("images"), "no list 'images'"),
        (lambda c: c["annotations"][0].pop("bbox"), r"annotations\[0\] has no 'bbox'"),
        (lambda c: c["annotations"][1].update(category_id=99), "category 99, which is not listed"),
        (lambda c: c["annotations"][0].update(image_id=5), "picture 5, which is not listed"),
        (lambda c: c["annotations"][0].update(bbox=[1, 2, 3]), "not \\[x, y, width, height\\]"),
        (lambda c: c["annotations"][0].update(segmentation=[]), "no usable segmentation"),
        (lambda c: c["images"][0].update(width=99), "is 12 x 10, .* says 99 x 10"),
        (lambda c: c["images"][0].update(file_name="no.png"), "no picture"),
        (lambda c: c.update(images=[]), "no pictures"),
    ],
)
def test_a_wrong_file_is_refused_with_what_is_wrong(
    written: Path, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    path = written / "annotations.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(DataError, match=said):
        read(written)


def test_a_damaged_picture_or_file_is_named(written: Path) -> None:
    picture = next((written / "images").iterdir())
    picture.write_bytes(picture.read_bytes()[:60])
    with pytest.raises(DataError, match=picture.name):
        read(written)
    (written / "annotations.json").write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match="no JSON file"):
        read(written)
    with pytest.raises(DataError, match="no annotations file"):
        read_coco(written / "other.json", written)


def test_a_grey_picture_is_read_with_three_channels(written: Path) -> None:
    path = written / "images" / f"{9:012d}.png"
    Image.fromarray(np.zeros((8, 6), np.uint8)).save(path)
    assert read(written).images[2].shape == (3, 8, 6)


def test_labels_outside_the_classes_are_refused() -> None:
    with pytest.raises(DataError, match="classes from 1 to 1"):
        DetectionSamples(
            (torch.zeros(3, 10, 12).byte(),),
            (Objects.of([SQUARE], [2]),),
            ((10, 12),),
            (1,),
            (1,),
            ("cat",),
        )


def test_objects_of_unequal_number_are_refused() -> None:
    with pytest.raises(DataError, match="as many"):
        Objects(torch.zeros(2, 4), torch.ones(1).long(), (SQUARE,), torch.zeros(1), torch.ones(1))


def test_a_real_coco_file_is_read_with_all_its_objects(real: Path) -> None:
    folder = real / "data" / "coco_mini"
    path = folder / "annotations" / "instances_val.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    samples = read_coco(path, folder / "val2017", limit=12)
    wanted = {i: sum(a["image_id"] == i for a in content["annotations"]) for i in samples.image_ids}
    assert {i: len(o) for i, o in zip(samples.image_ids, samples.objects, strict=True)} == wanted
    assert len(samples.names) == 80
    for (height, width), image in zip(samples.sizes, samples.images, strict=True):
        assert image.shape == (3, height, width)
