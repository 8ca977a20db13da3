"""Three stages of heads, each on the boxes of the one before (Cai and Vasconcelos, CVPR 2018)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection.roi_heads import (
    RoIHeads,
    fastrcnn_loss,
    maskrcnn_inference,
    maskrcnn_loss,
)
from torchvision.ops import clip_boxes_to_image

from lampq.detection.heads import roi_heads
from lampq.detection.options import DetectorOptions

Targets = list[dict[str, Tensor]]
Shapes = list[tuple[int, int]]


class CascadeHeads(nn.Module):
    """The heads of a Cascade Mask R-CNN; takes what torchvision's ``RoIHeads`` takes.

    At test the logits of all stages are averaged on the boxes of the last one, and so are the
    probabilities of their masks.
    """

    def __init__(self, options: DetectorOptions, strides: tuple[int, ...]) -> None:
        super().__init__()
        self.weights = options.stage_weights
        self.stages: Any = nn.ModuleList(
            roi_heads(options, strides, i) for i in range(options.stages)
        )

    def forward(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        image_shapes: Shapes,
        targets: Targets | None = None,
    ) -> tuple[Targets, dict[str, Tensor]]:
        """Detections of each image at test, losses in training."""
        if self.training:
            assert targets is not None, "torchvision has refused training without targets"
            return [], self._losses(features, proposals, image_shapes, targets)
        return self._detections(features, proposals, image_shapes), {}

    def _losses(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        image_shapes: Shapes,
        targets: Targets,
    ) -> dict[str, Tensor]:
        losses: dict[str, Tensor] = {}
        for i, (stage, weight) in enumerate(zip(self.stages, self.weights, strict=True)):
            proposals, matched, labels, wanted = stage.select_training_samples(proposals, targets)
            logits, deltas = _boxes(stage, features, proposals, image_shapes)
            by_class, by_box = fastrcnn_loss(logits, deltas, labels, wanted)
            losses[f"loss_classifier_{i}"] = weight * by_class
            losses[f"loss_box_reg_{i}"] = weight * by_box
            found = [torch.where(label > 0)[0] for label in labels]
            objects = [boxes[at] for boxes, at in zip(proposals, found, strict=True)]
            losses[f"loss_mask_{i}"] = weight * maskrcnn_loss(
                _masks(stage, features, objects, image_shapes),
                objects,
                [target["masks"] for target in targets],
                [target["labels"] for target in targets],
                [index[at] for index, at in zip(matched, found, strict=True)],
            )
            classes = logits[:, 1:].argmax(dim=1) + 1
            own = torch.cat(labels)
            classes = torch.where(own > 0, own, classes)
            refined = _refined(stage, deltas, classes, proposals, image_shapes)
            proposals = [
                boxes[~_among(before, target["boxes"])]
                for boxes, before, target in zip(refined, proposals, targets, strict=True)
            ]
        return losses

    def _detections(
        self, features: dict[str, Tensor], proposals: list[Tensor], image_shapes: Shapes
    ) -> Targets:
        every: list[Tensor] = []
        for i, stage in enumerate(self.stages):
            logits, deltas = _boxes(stage, features, proposals, image_shapes)
            every.append(logits)
            if i + 1 < len(self.stages):
                classes = logits[:, 1:].argmax(dim=1) + 1
                proposals = _refined(stage, deltas, classes, proposals, image_shapes)
        mean = torch.stack(every).mean(dim=0)
        boxes, scores, labels = stage.postprocess_detections(mean, deltas, proposals, image_shapes)
        masks = [
            maskrcnn_inference(_masks(stage, features, boxes, image_shapes), labels)
            for stage in self.stages
        ]
        return [
            {"boxes": b, "labels": c, "scores": s, "masks": torch.stack(m).mean(dim=0)}
            for b, c, s, m in zip(boxes, labels, scores, zip(*masks, strict=True), strict=True)
        ]


def _boxes(
    stage: RoIHeads, features: dict[str, Tensor], proposals: list[Tensor], shapes: Shapes
) -> tuple[Tensor, Tensor]:
    pooled = stage.box_roi_pool(features, proposals, shapes)
    logits, deltas = stage.box_predictor(stage.box_head(pooled))
    return logits, deltas


def _masks(
    stage: RoIHeads, features: dict[str, Tensor], boxes: list[Tensor], shapes: Shapes
) -> Tensor:
    pooled = stage.mask_roi_pool(features, boxes, shapes)
    logits: Tensor = stage.mask_predictor(stage.mask_head(pooled))
    return logits


@torch.no_grad()
def _refined(
    stage: RoIHeads, deltas: Tensor, classes: Tensor, proposals: list[Tensor], shapes: Shapes
) -> list[Tensor]:
    """The proposals moved by the deltas of their class, inside the images."""
    decoded = stage.box_coder.decode(deltas, proposals)
    moved = decoded[torch.arange(len(classes), device=classes.device), classes]
    parts = moved.split([len(boxes) for boxes in proposals])
    return [clip_boxes_to_image(boxes, shape) for boxes, shape in zip(parts, shapes, strict=True)]


def _among(boxes: Tensor, objects: Tensor) -> Tensor:
    """Which boxes are one of the objects, put among the proposals for training."""
    return (boxes[:, None] == objects.to(boxes)[None]).all(dim=-1).any(dim=1)
