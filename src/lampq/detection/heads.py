"""What a detector says of a region: its class, its box and its mask."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads

from lampq.detection.options import DetectorOptions
from lampq.detection.regions import RegionPool

BOX_SIZE, MASK_SIZE = 7, 14  # sides of a pooled region


class BoxPredictor(nn.Module):
    """Logits of the classes, background first, and box deltas for each of them."""

    def __init__(self, channels: int, classes: int, class_agnostic: bool) -> None:
        super().__init__()
        self.classes, self.class_agnostic = classes + 1, class_agnostic
        self.cls_score = nn.Linear(channels, classes + 1)
        self.bbox_pred = nn.Linear(channels, 4 if class_agnostic else 4 * (classes + 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (boxes, classes) and deltas (boxes, 4 * classes)."""
        deltas: Tensor = self.bbox_pred(x)
        if self.class_agnostic:
            deltas = deltas.repeat(1, self.classes)
        return self.cls_score(x), deltas


def _box_head(options: DetectorOptions) -> nn.Module:
    norm: Callable[..., nn.Module] | None = nn.BatchNorm2d if options.box_convs else None
    channels = options.fpn_channels
    head: nn.Module = FastRCNNConvFCHead(
        (channels, BOX_SIZE, BOX_SIZE),
        [channels] * options.box_convs,
        [options.box_channels] * options.box_fcs,
        norm_layer=norm,
    )
    return head


def roi_heads(options: DetectorOptions, strides: tuple[int, ...], stage: int = 0) -> RoIHeads:
    """The heads of one stage, at the strides of the levels that regions are taken from."""
    masks = [options.mask_channels] * options.mask_convs
    iou = options.stage_ious[stage]
    x, y, width, height = (1 / std for std in options.box_stds[stage])
    return RoIHeads(
        box_roi_pool=RegionPool(BOX_SIZE, strides, options.finest_scale),
        box_head=_box_head(options),
        box_predictor=BoxPredictor(options.box_channels, options.classes, options.class_agnostic),
        fg_iou_thresh=iou,
        bg_iou_thresh=iou,
        batch_size_per_image=options.box_samples,
        positive_fraction=0.25,
        bbox_reg_weights=(x, y, width, height),
        score_thresh=options.score_threshold,
        nms_thresh=options.nms_threshold,
        detections_per_img=options.detections,
        mask_roi_pool=RegionPool(MASK_SIZE, strides, options.finest_scale),
        mask_head=MaskRCNNHeads(options.fpn_channels, masks, dilation=1),
        mask_predictor=MaskRCNNPredictor(
            options.mask_channels, options.mask_channels, options.classes + 1
        ),
    )
