"""Pictures with boxes and masks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from lampq.detection.rle import Mask
from lampq.errors import DataError

Target = dict[str, Tensor]


def read_rgb(path: Path) -> Tensor:
    """One picture as it is, bytes (3, height, width)."""
    from PIL import Image, UnidentifiedImageError

    if not path.is_file():
        raise DataError(f"no picture {str(path)!r}")
    try:
        with Image.open(path) as opened:
            pixels = np.asarray(opened.convert("RGB")).copy()
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise DataError(f"cannot read picture {str(path)!r}: {error}") from error
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


@dataclass(frozen=True, slots=True)
class Objects:
    """What is in one picture.

    Attributes:
        boxes: (n, 4) floats, x and y of two corners.
        labels: (n,) from 1.
        masks: n masks of the size of the picture.
        iscrowd: (n,) 1 where a mask has many objects in it; they are no targets of training.
        area: (n,) pixels, by which COCO tells small from large.
    """

    boxes: Tensor
    labels: Tensor
    masks: tuple[Mask, ...]
    iscrowd: Tensor
    area: Tensor

    def __post_init__(self) -> None:
        fields = (self.labels, self.masks, self.iscrowd, self.area)
        counts = [len(field) for field in fields]
        if {self.boxes.shape} != {(count, 4) for count in counts}:
            raise DataError(
                f"boxes of shape {tuple(self.boxes.shape)} need as many labels, masks, crowds and "
                f"areas, got {counts}"
            )

    def __len__(self) -> int:
        return len(self.labels)

    @classmethod
    def of(cls, masks: Sequence[Mask], labels: Sequence[int]) -> Objects:
        """Objects of exact masks; boxes and areas are those of the masks."""
        return cls(
            torch.tensor([mask.box() for mask in masks]).reshape(-1, 4),
            torch.tensor(labels, dtype=torch.int64),
            tuple(masks),
            torch.zeros(len(masks), dtype=torch.int64),
            torch.tensor([mask.area for mask in masks], dtype=torch.float32),
        )

    def target(self, size: tuple[int, int]) -> Target:
        """What torchvision's detectors learn from: all but crowds, and masks (n, height, width)."""
        keep = self.iscrowd == 0
        arrays = [m.pixels() for m, k in zip(self.masks, keep.tolist(), strict=True) if k]
        masks = np.stack(arrays) if arrays else np.zeros((0, *size), np.uint8)
        return {
            "boxes": self.boxes[keep],
            "labels": self.labels[keep],
            "masks": torch.from_numpy(masks),
            "area": self.area[keep],
            "iscrowd": self.iscrowd[keep],
        }


class PictureFiles(Sequence[Tensor]):
    """Pictures that are read from their files when asked for, bytes (3, height, width)."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)

    def __len__(self) -> int:
        return len(self.paths)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> PictureFiles: ...
    def __getitem__(self, index: int | slice) -> Tensor | PictureFiles:
        if isinstance(index, slice):
            return PictureFiles(self.paths[index])
        return read_rgb(self.paths[index])

    def pick(self, index: Sequence[int]) -> PictureFiles:
        """Some of them."""
        return PictureFiles([self.paths[i] for i in index])


@dataclass(frozen=True, slots=True)
class DetectionSamples:
    """Pictures of any size with their objects.

    Masks are kept as run lengths, and pictures of files are read when they are asked for, so that
    memory stays bounded.

    Attributes:
        images: Bytes (channels, height, width), one each.
        objects: What is in each of them.
        sizes: Height and width of each.
        image_ids: Their ids in COCO's files.
        category_ids: The id of each class; label 1 is the first.
        names: The name of each class.
    """

    images: Sequence[Tensor]
    objects: tuple[Objects, ...]
    sizes: tuple[tuple[int, int], ...]
    image_ids: tuple[int, ...]
    category_ids: tuple[int, ...]
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        counts = {len(self.images), len(self.objects), len(self.sizes), len(self.image_ids)}
        if len(counts) != 1 or not len(self.images):
            raise DataError(
                f"detection samples need as many objects, sizes and ids as pictures, and a picture "
                f"at least; got {len(self.images)} pictures and {len(self.objects)} of objects"
            )
        if len(set(self.image_ids)) != len(self.image_ids):
            raise DataError("two pictures of the detection samples have one id")
        if len(self.names) != len(self.category_ids) or not self.names:
            raise DataError(f"{len(self.category_ids)} categories but {len(self.names)} names")
        for image_id, found in zip(self.image_ids, self.objects, strict=True):
            labels = found.labels
            if len(labels) and not 1 <= int(labels.min()) <= int(labels.max()) <= len(self.names):
                raise DataError(
                    f"picture {image_id}: labels go from {int(labels.min())} to "
                    f"{int(labels.max())}, the classes from 1 to {len(self.names)}"
                )

    def __len__(self) -> int:
        return len(self.images)

    def inputs(self, index: slice) -> list[Tensor]:
        """Network inputs of some samples: floats from 0 to 1, each of its size."""
        return [self.images[i].float() / 255 for i in range(*index.indices(len(self)))]

    def targets(self, index: slice) -> list[Target]:
        """Boxes, labels and decoded masks of some samples, without crowds."""
        return [self.objects[i].target(self.sizes[i]) for i in range(*index.indices(len(self)))]

    def batches(self, size: int = 4) -> Iterator[tuple[list[Tensor], list[Target]]]:
        """Network inputs and targets, in order."""
        for start in range(0, len(self), size):
            part = slice(start, start + size)
            yield self.inputs(part), self.targets(part)

    def pick(self, index: Sequence[int]) -> DetectionSamples:
        """The samples of these places, in this order."""
        images = self.images
        return replace(
            self,
            images=images.pick(index)
            if isinstance(images, PictureFiles)
            else tuple(images[i] for i in index),
            objects=tuple(self.objects[i] for i in index),
            sizes=tuple(self.sizes[i] for i in index),
            image_ids=tuple(self.image_ids[i] for i in index),
        )

    def subset(self, count: int, seed: int) -> DetectionSamples:
        """A random subset, in random order, the same for the same seed; all if count is large."""
        if count >= len(self):
            return self
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        return self.pick(order[:count].tolist())

    def split(self, count: int, seed: int) -> tuple[DetectionSamples, DetectionSamples]:
        """Two parts without a common sample: the second, drawn at random, has ``count``."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed)).tolist()
        return self.pick(sorted(order[count:])), self.pick(sorted(order[:count]))

    def to_coco(self) -> dict[str, Any]:
        """The annotations as COCO's files write them."""
        annotations = [
            {
                "id": 0,
                "image_id": image_id,
                "category_id": self.category_ids[label - 1],
                "bbox": [box[0], box[1], box[2] - box[0], box[3] - box[1]],
                "area": area,
                "iscrowd": crowd,
                "segmentation": mask.to_json(),
            }
            for image_id, found in zip(self.image_ids, self.objects, strict=True)
            for box, label, area, crowd, mask in zip(
                found.boxes.double().tolist(),
                found.labels.tolist(),
                found.area.tolist(),
                found.iscrowd.tolist(),
                found.masks,
                strict=True,
            )
        ]
        for number, annotation in enumerate(annotations, start=1):
            annotation["id"] = number
        return {
            "images": [
                {"id": i, "file_name": f"{i:012d}.png", "height": height, "width": width}
                for i, (height, width) in zip(self.image_ids, self.sizes, strict=True)
            ],
            "categories": [
                {"id": i, "name": name}
                for i, name in zip(self.category_ids, self.names, strict=True)
            ],
            "annotations": annotations,
        }
