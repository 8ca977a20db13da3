"""What a detector is built from, as a value that can be written down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from lampq.errors import ConfigError

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True, slots=True)
class DetectorOptions:
    """The architecture of a detector; the defaults are those of the published Swin detectors.

    Attributes:
        name: A Swin of timm, or ``scene_swin``.
        classes: Number of classes of objects, background not counted.
        cascade: Three box stages (Cascade Mask R-CNN) instead of one (Mask R-CNN).
        embed_dim: Channels of the first stage; None: as the name says, like the next three.
        depths: Blocks of each stage.
        num_heads: Heads of each stage.
        window_size: Side of a window.
        drop_path: Share of residual branches dropped in training.
        fpn_channels: Channels of every level of the pyramid.
        anchor_sizes: Side of the square anchor of each level, the pooled last level included.
        aspect_ratios: Height by width of the anchors of one place.
        min_size: The shorter side of an image after resizing.
        max_size: The longer side is not made larger than this.
        image_mean: Mean of each channel of the input, which is between 0 and 1.
        image_std: Standard deviation of each channel.
        finest_scale: Regions below twice this side are taken from the first level.
        box_convs: Convolutions with batch norm before the linear layers of a box head.
        box_fcs: Hidden linear layers of a box head.
        box_channels: Width of these linear layers.
        class_agnostic: One box for all classes instead of one for each.
        box_stds: Standard deviations of the box deltas, for each stage.
        stage_ious: Overlap from which a proposal is positive, for each stage.
        stage_weights: Weight of the losses of each stage.
        mask_convs: Convolutions of a mask head.
        mask_channels: Channels of these convolutions.
        proposals_before: Proposals of one level and image before suppression, training and test.
        proposals_after: Proposals of one image after suppression, training and test.
        rpn_samples: Anchors of one image in the loss.
        box_samples: Proposals of one image in the loss.
        score_threshold: Detections below this score are left out.
        nms_threshold: Of two detections of one class that overlap more, one is left out.
        detections: The most detections of one image.
    """

    name: str
    classes: int
    cascade: bool = False
    embed_dim: int | None = None
    depths: tuple[int, ...] | None = None
    num_heads: tuple[int, ...] | None = None
    window_size: int | None = None
    drop_path: float = 0.0
    fpn_channels: int = 256
    anchor_sizes: tuple[int, ...] = (32, 64, 128, 256, 512)
    aspect_ratios: tuple[float, ...] = (0.5, 1.0, 2.0)
    min_size: int = 800
    max_size: int = 1333
    image_mean: tuple[float, ...] = IMAGENET_MEAN
    image_std: tuple[float, ...] = IMAGENET_STD
    finest_scale: int = 56
    box_convs: int = 0
    box_fcs: int = 2
    box_channels: int = 1024
    class_agnostic: bool = False
    box_stds: tuple[tuple[float, ...], ...] = (
        (0.1, 0.1, 0.2, 0.2),
        (0.05, 0.05, 0.1, 0.1),
        (0.033, 0.033, 0.067, 0.067),
    )
    stage_ious: tuple[float, ...] = (0.5, 0.6, 0.7)
    stage_weights: tuple[float, ...] = (1.0, 0.5, 0.25)
    mask_convs: int = 4
    mask_channels: int = 256
    proposals_before: tuple[int, int] = (2000, 1000)
    proposals_after: tuple[int, int] = (1000, 1000)
    rpn_samples: int = 256
    box_samples: int = 512
    score_threshold: float = 0.05
    nms_threshold: float = 0.5
    detections: int = 100

    def __post_init__(self) -> None:
        if self.classes < 1:
            raise ConfigError(f"a detector needs at least one class, not {self.classes}")
        if len(self.image_mean) != len(self.image_std):
            raise ConfigError(
                f"image_mean has {len(self.image_mean)} channels and image_std "
                f"{len(self.image_std)}; they must be as many"
            )
        if not len(self.box_stds) == len(self.stage_ious) == len(self.stage_weights):
            raise ConfigError(
                "box_stds, stage_ious and stage_weights must have one entry for each stage, not "
                f"{len(self.box_stds)}, {len(self.stage_ious)} and {len(self.stage_weights)}"
            )

    @property
    def stages(self) -> int:
        """How many box stages the detector has."""
        return len(self.stage_ious) if self.cascade else 1

    def to_json(self) -> dict[str, Any]:
        """The options as values of JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> DetectorOptions:
        """The options that ``to_json`` wrote; an unknown one is an error."""
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            known = ", ".join(field.name for field in fields(cls))
            raise ConfigError(f"a detector has no option {unknown[0]!r}; it has {known}")
        missing = [name for name in ("name", "classes") if name not in values]
        if missing:
            raise ConfigError(f"the options of a detector lack {missing[0]!r}")
        return cls(**{name: _tuples(value) for name, value in values.items()})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
