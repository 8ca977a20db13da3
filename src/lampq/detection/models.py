"""Mask R-CNN and Cascade Mask R-CNN on Swin backbones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from lampq.detection.backbone import SwinFPN
from lampq.detection.cascade import CascadeHeads
from lampq.detection.heads import roi_heads
from lampq.detection.options import DetectorOptions
from lampq.detection.regions import Anchors
from lampq.errors import ConfigError

# what the named detectors have instead of the defaults
PRESETS: dict[str, dict[str, Any]] = {
    "scene_swin": {
        "fpn_channels": 64,
        "anchor_sizes": (20, 36, 56, 84),
        "min_size": 128,
        "max_size": 256,
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.25, 0.25, 0.25),
        "finest_scale": 28,
        "box_channels": 128,
        "mask_convs": 2,
        "mask_channels": 48,
        "proposals_before": (150, 150),
        "proposals_after": (100, 60),
        "rpn_samples": 64,
        "box_samples": 32,
        "detections": 30,
    },
}


class Detector(GeneralizedRCNN):  # type: ignore[misc]
    """A two-stage detector with masks; called as torchvision's detectors are.

    Attributes:
        options: What it is built from.
    """

    def __init__(self, options: DetectorOptions) -> None:
        backbone = SwinFPN(options)
        if len(options.anchor_sizes) != len(backbone.strides):
            raise ConfigError(
                f"{options.name!r} has {len(backbone.strides)} levels and needs as many anchor "
                f"sizes, not {len(options.anchor_sizes)}"
            )
        anchors = Anchors(options.anchor_sizes, options.aspect_ratios, backbone.strides)
        regions = backbone.strides[:-1]
        super().__init__(
            backbone,
            _proposals(options, anchors),
            CascadeHeads(options, regions) if options.cascade else roi_heads(options, regions),
            GeneralizedRCNNTransform(
                options.min_size,
                options.max_size,
                list(options.image_mean),
                list(options.image_std),
            ),
        )
        self.options = options


def _proposals(options: DetectorOptions, anchors: Anchors) -> RegionProposalNetwork:
    def of_both(pair: tuple[int, int]) -> dict[str, int]:
        return {"training": pair[0], "testing": pair[1]}

    return RegionProposalNetwork(
        anchors,
        RPNHead(options.fpn_channels, len(options.aspect_ratios)),
        fg_iou_thresh=0.7,
        bg_iou_thresh=0.3,
        batch_size_per_image=options.rpn_samples,
        positive_fraction=0.5,
        pre_nms_top_n=of_both(options.proposals_before),
        post_nms_top_n=of_both(options.proposals_after),
        nms_thresh=0.7,
    )


def detector(name: str, *, classes: int, cascade: bool = False, **options: Any) -> Detector:
    """A detector with random weights, in evaluation mode.

    Args:
        name: A Swin of timm, such as ``swin_tiny_patch4_window7_224``, or ``scene_swin``.
        classes: Number of classes of objects; labels go from 1 to this.
        cascade: Three box stages instead of one.
        options: Fields of ``DetectorOptions`` that differ from the defaults of the name.
    """
    values = {**PRESETS.get(name, {}), **options}
    chosen = {"name": name, "classes": classes, "cascade": cascade, **values}
    model: Detector = Detector(DetectorOptions.from_json(chosen)).eval()
    return model


@contextmanager
def _gives_losses(model: Detector) -> Iterator[None]:
    """Inside, the model gives its losses; norms and dropout stay in their mode."""
    # torchvision asks these three, and only these, whether to give losses or detections
    parts: tuple[nn.Module, ...] = (model, model.rpn, model.roi_heads)
    modes = [part.training for part in parts]
    for part in parts:
        part.training = True
    try:
        yield
    finally:
        for part, mode in zip(parts, modes, strict=True):
            part.training = mode


def detection_losses(
    model: nn.Module, images: list[Tensor], targets: list[dict[str, Tensor]], *, seed: int = 0
) -> dict[str, Tensor]:
    """The losses of a detector, by name, with the model in the mode it is in.

    Anchors and proposals are drawn with the seed, so that the losses are the same every time.
    """
    if not isinstance(model, Detector):
        raise ConfigError(f"only a detector has these losses, not a {type(model).__name__}")
    cuda = {image.device.index for image in images if image.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(cuda)), _gives_losses(model):
        torch.manual_seed(seed)
        losses: dict[str, Tensor] = model(images, targets)
    return losses
