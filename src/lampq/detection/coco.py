"""COCO's files of pictures with boxes and masks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lampq.detection.rle import from_segmentation
from lampq.detection.samples import DetectionSamples, Objects, PictureFiles, read_rgb
from lampq.errors import DataError
from lampq.progress import Progress

__all__ = ["DetectionSamples", "read_coco", "write_coco"]

NEEDED = {
    "images": ("id", "file_name", "height", "width"),
    "categories": ("id",),
    "annotations": ("image_id", "category_id", "bbox", "segmentation"),
}


def read_coco(
    annotations: Path,
    images: Path,
    *,
    limit: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> DetectionSamples:
    """Samples of a COCO instances file and its folder of pictures.

    Every picture is opened once, so that a damaged one is found here and not in the middle of a
    run. With a limit, a random choice of pictures kept in order.
    """
    content = _content(annotations)
    categories = sorted(content["categories"], key=lambda category: category["id"])
    labels = {category["id"]: place for place, category in enumerate(categories, start=1)}
    entries = sorted(content["images"], key=lambda entry: entry["id"])
    if not entries or not labels:
        raise DataError(f"{str(annotations)!r} lists no pictures or no categories")
    if limit is not None and limit < len(entries):
        order = torch.randperm(len(entries), generator=torch.Generator().manual_seed(seed))
        entries = [entries[i] for i in sorted(order[:limit].tolist())]
    by_image: dict[Any, list[Mapping[str, Any]]] = {entry["id"]: [] for entry in entries}
    known = {entry["id"] for entry in content["images"]}
    for annotation in content["annotations"]:
        if annotation["image_id"] not in known:
            raise DataError(
                f"{str(annotations)!r}: annotation {annotation.get('id')} is of picture "
                f"{annotation['image_id']!r}, which is not listed"
            )
        if annotation["image_id"] in by_image:
            by_image[annotation["image_id"]].append(annotation)
    objects, sizes, paths = [], [], []
    for entry in (progress or Progress()).track(entries, "reading pictures", len(entries)):
        path = images / entry["file_name"]
        height, width = read_rgb(path).shape[1:]
        if (height, width) != (entry["height"], entry["width"]):
            raise DataError(
                f"picture {str(path)!r} is {width} x {height}, {str(annotations)!r} says "
                f"{entry['width']} x {entry['height']}"
            )
        found = by_image[entry["id"]]
        objects.append(_objects(found, labels, (height, width), str(annotations)))
        sizes.append((height, width))
        paths.append(path)
    return DetectionSamples(
        PictureFiles(paths),
        tuple(objects),
        tuple(sizes),
        tuple(entry["id"] for entry in entries),
        tuple(labels),
        tuple(str(category.get("name", category["id"])) for category in categories),
    )


def _content(path: Path) -> Mapping[str, list[Mapping[str, Any]]]:
    """The three lists of a COCO file, with all fields that are needed."""
    if not path.is_file():
        raise DataError(f"no annotations file {str(path)!r}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{str(path)!r} is no JSON file: {error}") from error
    for name, fields in NEEDED.items():
        entries = content.get(name) if isinstance(content, dict) else None
        if not isinstance(entries, list):
            raise DataError(
                f"{str(path)!r} has no list {name!r}; a COCO instances file has images, "
                "categories and annotations"
            )
        for place, entry in enumerate(entries):
            lacking = [f for f in fields if not isinstance(entry, dict) or f not in entry]
            if lacking:
                raise DataError(f"{str(path)!r}: {name}[{place}] has no {lacking[0]!r}")
    checked: Mapping[str, list[Mapping[str, Any]]] = content
    return checked


def _objects(
    found: list[Mapping[str, Any]], labels: Mapping[Any, int], size: tuple[int, int], where: str
) -> Objects:
    """The objects of one picture's annotations."""
    boxes, classes, masks, crowds, areas = [], [], [], [], []
    for one in found:
        name = f"{where}: annotation {one.get('id')}"
        if one["category_id"] not in labels:
            raise DataError(f"{name} has category {one['category_id']!r}, which is not listed")
        box = one["bbox"]
        if not isinstance(box, list) or len(box) != 4 or min(box[2:]) < 0:
            raise DataError(f"{name} has the box {box!r}, not [x, y, width, height]")
        if min(box[2:]) == 0:
            continue  # nothing to find
        try:
            mask = from_segmentation(one["segmentation"], *size)
        except (ValueError, TypeError) as error:
            raise DataError(f"{name} has no usable segmentation: {error}") from error
        boxes.append((box[0], box[1], box[0] + box[2], box[1] + box[3]))
        classes.append(labels[one["category_id"]])
        masks.append(mask)
        crowds.append(int(one.get("iscrowd", 0)))
        areas.append(float(one.get("area", mask.area)))
    return Objects(
        torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        torch.tensor(classes, dtype=torch.int64),
        tuple(masks),
        torch.tensor(crowds, dtype=torch.int64),
        torch.tensor(areas, dtype=torch.float32),
    )


def write_coco(samples: DetectionSamples, folder: Path) -> Path:
    """Write ``annotations.json`` and ``images/*.png``; gives back the annotations file."""
    from PIL import Image

    (folder / "images").mkdir(parents=True, exist_ok=True)
    content = samples.to_coco()
    for entry, image in zip(content["images"], samples.images, strict=True):
        pixels = image.permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(folder / "images" / entry["file_name"])
    target = folder / "annotations.json"
    target.write_text(json.dumps(content), encoding="utf-8")
    return target
