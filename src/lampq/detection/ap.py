"""Average precision of boxes and masks, as COCO defines it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lampq.detection.rle import Mask, coco_package
from lampq.detection.samples import DetectionSamples, Objects
from lampq.errors import DataError
from lampq.progress import Progress

MOST = 100  # detections a picture that count, as in COCO's scores
INSIDE = 0.5  # probability from which on a pixel belongs to the mask


@dataclass(frozen=True, slots=True)
class Detection:
    """What a detector found in one picture.

    Attributes:
        boxes: (n, 4) floats, x and y of two corners.
        labels: (n,) from 1.
        scores: (n,) from 0 to 1.
        masks: n masks of the size of the picture.
    """

    boxes: Tensor
    labels: Tensor
    scores: Tensor
    masks: tuple[Mask, ...]

    @classmethod
    def of(cls, output: Mapping[str, Tensor]) -> Detection:
        """The answer of a torchvision detector, masks (n, 1, height, width) as run lengths."""
        masks = (output["masks"][:, 0] >= INSIDE).cpu().numpy()
        boxes, labels, scores = (output[key].cpu() for key in ("boxes", "labels", "scores"))
        return cls(boxes, labels, scores, tuple(Mask.of(mask) for mask in masks))

    @classmethod
    def exact(cls, objects: Objects) -> Detection:
        """The objects themselves as certain detections, crowds left out."""
        keep = objects.iscrowd == 0
        masks = (m for m, k in zip(objects.masks, keep.tolist(), strict=True) if k)
        labels = objects.labels[keep]
        return cls(objects.boxes[keep], labels, torch.ones(len(labels)), tuple(masks))


@dataclass(frozen=True, slots=True)
class Precision:
    """Average precisions of one kind, boxes or masks, from 0 to 1; None where nothing is to find.

    Attributes:
        ap: Mean over classes and overlaps of 0.50, 0.55, ... 0.95.
        ap50: At an overlap of 0.5.
        ap75: At an overlap of 0.75.
        small: Of objects below 32 x 32 pixels.
        medium: Of objects between.
        large: Of objects above 96 x 96 pixels.
        per_class: ``ap`` of each class by name.
    """

    ap: float | None
    ap50: float | None
    ap75: float | None
    small: float | None
    medium: float | None
    large: float | None
    per_class: Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class CocoScores:
    """Average precisions of boxes and of masks over so many pictures."""

    box: Precision
    mask: Precision
    images: int

    def to_json(self) -> dict[str, Any]:
        """The numbers, ready for a file."""
        return asdict(self)


@torch.no_grad()
def detect(
    model: nn.Module, samples: DetectionSamples, *, batch: int = 4, progress: Progress | None = None
) -> list[Detection]:
    """What a torchvision detector in evaluation mode finds in every picture."""
    if model.training:
        raise DataError("a detector in training mode gives losses; call its eval() first")
    starts = range(0, len(samples), batch)
    found: list[Detection] = []
    for start in (progress or Progress()).track(starts, "detecting", len(starts)):
        outputs = model(samples.inputs(slice(start, start + batch)))
        found += [Detection.of(output) for output in outputs]
    return found


def average_precision(samples: DetectionSamples, detections: Sequence[Detection]) -> CocoScores:
    """Box and mask AP of one detection per sample, in the order of the samples."""
    if len(detections) != len(samples):
        raise DataError(f"{len(samples)} pictures but detections of {len(detections)}")
    package = coco_package()
    truth = package.COCO(_compressed(samples.to_coco(), package))
    results = _results(samples, detections, package)
    return CocoScores(
        _precision(samples, truth, results, "bbox", package),
        _precision(samples, truth, results, "segm", package),
        len(samples),
    )


def _compressed(content: dict[str, Any], package: Any) -> dict[str, Any]:
    """The same annotations with compressed run lengths, as the package wants them."""
    for one in content["annotations"]:
        one["segmentation"] = package.mask.frPyObjects(one["segmentation"], *_size(one))
    return content


def _size(annotation: Mapping[str, Any]) -> tuple[int, int]:
    height, width = annotation["segmentation"]["size"]
    return height, width


def _results(
    samples: DetectionSamples, detections: Sequence[Detection], package: Any
) -> Callable[[str], list[dict[str, Any]]]:
    """A function that lists the detections anew for each kind; the package edits its lists."""
    rows: list[dict[str, Any]] = []
    for image_id, found in zip(samples.image_ids, detections, strict=True):
        order = found.scores.argsort(descending=True, stable=True)[:MOST]
        for place in order.tolist():
            left, top, right, bottom = found.boxes[place].double().tolist()
            label, mask = int(found.labels[place]), found.masks[place]
            if not 1 <= label <= len(samples.names):
                raise DataError(
                    f"a detection has label {label}, classes are 1 to {len(samples.names)}"
                )
            rows.append(
                {
                    "image_id": image_id,
                    "category_id": samples.category_ids[label - 1],
                    "score": float(found.scores[place]),
                    "bbox": [left, top, right - left, bottom - top],
                    "segmentation": package.mask.frPyObjects(
                        mask.to_json(), mask.height, mask.width
                    ),
                }
            )

    def listed(kind: str) -> list[dict[str, Any]]:
        # sizes of masks are judged by the mask, so the box must not be there
        drop = "segmentation" if kind == "bbox" else "bbox"
        return [{key: value for key, value in row.items() if key != drop} for row in rows]

    return listed


def _precision(
    samples: DetectionSamples,
    truth: Any,
    results: Callable[[str], list[dict[str, Any]]],
    kind: str,
    package: Any,
) -> Precision:
    """The scores of one kind."""
    judge = package.COCOeval_faster(truth, truth.loadRes(results(kind)), kind)
    judge.params.imgIds, judge.params.catIds = list(samples.image_ids), list(samples.category_ids)
    judge.evaluate()
    judge.accumulate()
    # (overlaps, recalls, classes, sizes, numbers of detections); -1 where nothing is to find
    table = np.asarray(judge.eval["precision"])[..., -1]
    overlaps = np.asarray(judge.params.iouThrs)
    every, sizes = table[..., 0], ("small", "medium", "large")
    return Precision(
        ap=_mean(every),
        ap50=_mean(every[np.isclose(overlaps, 0.5)]),
        ap75=_mean(every[np.isclose(overlaps, 0.75)]),
        **{name: _mean(table[..., place]) for place, name in enumerate(sizes, start=1)},
        per_class={name: _mean(every[:, :, i]) for i, name in enumerate(samples.names)},
    )


def _mean(values: Any) -> float | None:
    """The mean of what is not -1."""
    known = values[values > -1]
    return float(known.mean()) if known.size else None
