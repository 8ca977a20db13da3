"""What the LampQ paper prints (Kim et al., AAAI 2026): its models and the numbers of its tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lampq.models import ModelSource

# what the paper calls its models, and the public weights whose accuracy is the paper's
MODELS: dict[str, str] = {
    "ViT-S": "vit_small_patch16_224.augreg_in21k_ft_in1k",
    "ViT-B": "vit_base_patch16_224.augreg_in21k_ft_in1k",
    "DeiT-T": "deit_tiny_patch16_224.fb_in1k",
    "DeiT-S": "deit_small_patch16_224.fb_in1k",
    "DeiT-B": "deit_base_patch16_224.fb_in1k",
    "Swin-T": "swin_tiny_patch4_window7_224.ms_in1k",
    "Swin-S": "swin_small_patch4_window7_224.ms_in1k",
    "Swin-B": "swin_base_patch4_window7_224.ms_in22k_ft_in1k",
}


@dataclass(frozen=True, slots=True)
class PublishedDetector:
    """A detector of the paper: its Swin by timm's name, its kind, and its public weights file."""

    name: str
    cascade: bool
    file: str


DETECTORS: dict[str, PublishedDetector] = {
    f"{'Cascade ' if cascade else ''}Mask R-CNN Swin-{size[0].upper()}": PublishedDetector(
        f"swin_{size}_patch4_window7_224",
        cascade,
        f"{'cascade_' if cascade else ''}mask_rcnn_swin_{size}_patch4_window7",
    )
    for cascade in (False, True)
    for size in ("tiny", "small")
}
COCO_CLASSES = 80

# row -> model -> one number for each measure of the table
Scores = Mapping[tuple[str, str], Mapping[str, tuple[float, ...]]]


def label_of(source: ModelSource) -> str:
    """What the paper calls a model; its own name if the paper does not have it."""
    if source.kind == "detector":
        own = (source.name, source.options["cascade"], source.options["classes"])
        for label, one in DETECTORS.items():
            if own == (one.name, one.cascade, COCO_CLASSES):
                return label
        return source.name
    for label, name in MODELS.items():
        if source.name in (name, name.split(".")[0]):
            return label
    return source.name


def _rows(
    models: tuple[str, ...], rows: dict[tuple[str, str], tuple[float, ...]], measures: int = 1
) -> dict[tuple[str, str], dict[str, tuple[float, ...]]]:
    return {
        key: {
            model: values[i : i + measures]
            for model, i in zip(models, range(0, len(values), measures), strict=True)
        }
        for key, values in rows.items()
    }


CLASSIFICATION = _rows(
    ("ViT-S", "ViT-B", "DeiT-T", "DeiT-S", "DeiT-B", "Swin-S", "Swin-B"),
    {
        ("float", "32/32"): (81.38, 84.53, 72.13, 79.83, 81.80, 83.23, 85.27),
        ("qdrop", "4/4"): (17.77, 21.72, 31.65, 35.79, 65.47, 78.92, 80.49),
        ("ptq4vit", "4/4"): (42.57, 30.69, 36.96, 34.08, 64.39, 76.09, 74.02),
        ("pdquant", "4/4"): (32.64, 34.86, 58.50, 64.85, 73.76, 77.04, 75.84),
        ("repq", "4/4"): (65.05, 68.48, 57.43, 69.03, 75.61, 79.45, 78.32),
        ("optq", "4/4"): (67.59, 75.12, 58.96, 70.85, 76.10, 80.17, 81.08),
        ("erq", "4/4"): (68.91, 76.63, 60.29, 72.56, 78.23, 80.74, 82.44),
        ("adalog", "4/4"): (72.75, 79.68, 63.52, 72.06, 78.03, 80.77, 82.47),
        ("vtptq", "4/4"): (73.69, 80.10, 63.90, 72.78, 78.30, 80.96, 82.80),
        ("lampq", "4/4"): (74.02, 81.91, 65.71, 75.40, 79.24, 81.76, 83.87),
        ("qdrop", "3/3"): (4.44, 8.00, 30.73, 22.67, 24.37, 60.89, 54.76),
        ("ptq4vit", "3/3"): (0.01, 0.01, 0.04, 0.01, 0.27, 0.35, 0.29),
        ("repq", "3/3"): (0.43, 0.14, 0.97, 4.37, 4.84, 8.84, 1.34),
        ("adalog", "3/3"): (13.88, 37.91, 31.56, 24.47, 57.45, 64.41, 69.75),
        ("vtptq", "3/3"): (16.62, 42.13, 32.98, 26.37, 60.14, 69.80, 73.51),
        ("lampq", "3/3"): (23.06, 48.53, 37.54, 45.38, 61.44, 70.91, 75.82),
    },
)
# AP of boxes and of masks; the paper has no 3 bits here
DETECTION = _rows(
    tuple(DETECTORS),
    {
        ("float", "32/32"): (46.0, 41.6, 48.5, 43.3, 50.4, 43.7, 51.9, 45.0),
        ("repq", "4/4"): (36.1, 36.0, 44.2, 40.2, 47.0, 41.4, 49.3, 43.1),
        ("optq", "4/4"): (36.3, 36.3, 42.9, 40.2, 47.1, 41.5, 49.2, 43.2),
        ("erq", "4/4"): (36.8, 36.6, 43.4, 40.7, 47.9, 42.1, 50.0, 43.6),
        ("adalog", "4/4"): (39.1, 37.7, 44.3, 41.2, 48.2, 42.3, 50.6, 44.0),
        ("vtptq", "4/4"): (39.2, 37.7, 44.3, 41.3, 48.3, 42.5, 50.9, 44.2),
        ("lampq", "4/4"): (39.8, 38.4, 44.9, 41.8, 49.0, 43.1, 51.1, 44.5),
    },
    measures=2,
)
ZERO_SHOT = _rows(
    ("DeiT-T", "DeiT-S", "Swin-T", "Swin-S"),
    {
        ("float", "32/32"): (72.21, 79.85, 81.35, 83.20),
        ("psaq", "4/8"): (65.57, 72.04, 69.78, 75.03),
        ("vtptq", "4/8"): (65.65, 72.18, 69.91, 75.09),
        ("lampq", "4/8"): (66.27, 72.71, 70.24, 75.49),
        ("psaq", "8/8"): (71.56, 75.97, 73.54, 76.68),
        ("vtptq", "8/8"): (71.58, 76.02, 73.63, 76.72),
        ("lampq", "8/8"): (71.77, 76.20, 73.76, 76.85),
    },
)
ABLATION = _rows(
    ("DeiT-S",),
    {
        ("base", "3/3"): (24.47,),
        ("vtptq", "3/3"): (26.37,),
        ("i1+i2", "3/3"): (44.43,),
        ("i1+i3", "3/3"): (27.87,),
        ("lampq", "3/3"): (45.38,),
    },
)
# seconds at 3/3: AdaLog, VT-PTQ, LampQ
RUNTIME: dict[str, tuple[float, float, float]] = {
    "ViT-S": (165.3, 23.8 * 3600, 323.6),
    "DeiT-S": (278.9, 40.2 * 3600, 484.5),
    "Swin-S": (648.8, 93.5 * 3600, 1002.6),
}
# for 1 to 8 bits: E[X d] and E[d**2] of a normal variable X and its error d
MOMENTS = (
    *((1.396, 5.212), (1.655e-2, 3.359e-1), (7.123e-4, 6.109e-2), (1.723e-4, 1.330e-2)),
    *((4.123e-5, 3.113e-3), (1.003e-5, 7.538e-4), (2.472e-6, 1.855e-4), (6.134e-7, 4.601e-5)),
)
# for 1 to 8 bits: the expected error in parts of that at one bit
RELATIVE_ERRORS = (*(1.0, 1.209e-2, 1.835e-3, 3.903e-4, 9.093e-5, 2.199e-5, 5.339e-6, 1.324e-6),)
# the ranges of the grid search
GAMMAS = (2.0, 4.0, 6.0, 8.0, 10.0, 15.0, 20.0)
BETAS = (1, 2, 3, 4)
MUS = (0.25, 0.5, 0.75, 1.0)
CHOICES = ((1, 2, 3, 4, 5), (1, 2, 3, 4), (2, 3, 4, 5), (2, 3, 4))
