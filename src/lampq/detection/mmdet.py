"""Published Swin detectors: checkpoints with the key names of mmdetection.

Two sets of names are in use for the backbone: that of the authors of Swin (``layers``) and that of
mmdetection itself (``stages``), which also merges patches in another order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lampq.detection.models import Detector
from lampq.detection.options import DetectorOptions
from lampq.errors import FormatError
from lampq.models import load_state

Names = Literal["layers", "stages"]
# what stays, what is only compared, and what is in another order
Change = Literal["same", "compared", "merging", "background first", "background added"]
SWINS: dict[tuple[int, tuple[int, ...]], str] = {
    (96, (2, 2, 6, 2)): "swin_tiny_patch4_window7_224",
    (96, (2, 2, 18, 2)): "swin_small_patch4_window7_224",
    (128, (2, 2, 18, 2)): "swin_base_patch4_window7_224",
    (192, (2, 2, 18, 2)): "swin_large_patch4_window7_224",
}
_BOTH = ("weight", "bias")
_BATCH_NORM = (*_BOTH, "running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: its key in the file, its key in the detector, and what changes in between.

    Attributes:
        source: The key in the file.
        target: The key in the detector.
        change: ``merging``: the four patches that are merged are in another order.
            ``background first``: the rows of the classes are rolled, the file has background last.
            ``background added``: the file has no rows for background, they become zero.
            ``compared``: the file must have what the detector computes.
        rows: Rows of one class.
    """

    source: str
    target: str
    change: Change = "same"
    rows: int = 1

    def converted(self, values: Tensor) -> Tensor:
        """The tensor of the file as the detector has it."""
        if self.change == "merging":
            return _from_unfolded(values)
        if self.change == "background first":
            return values.roll(self.rows, dims=0)
        if self.change == "background added":
            return torch.cat([values.new_zeros(self.rows, *values.shape[1:]), values])
        return values

    def reverted(self, values: Tensor) -> Tensor:
        """The tensor of the detector as the file has it."""
        if self.change == "merging":
            return _to_unfolded(values)
        if self.change == "background first":
            return values.roll(-self.rows, dims=0)
        return values[self.rows :] if self.change == "background added" else values


def _from_unfolded(values: Tensor) -> Tensor:
    """From channel, row, column of the merged patches to column, row, channel."""
    channels = values.shape[-1] // 4
    split = values.reshape(*values.shape[:-1], channels, 2, 2)
    return split.transpose(-3, -1).reshape(values.shape)


def _to_unfolded(values: Tensor) -> Tensor:
    channels = values.shape[-1] // 4
    split = values.reshape(*values.shape[:-1], 2, 2, channels)
    return split.transpose(-3, -1).reshape(values.shape)


def key_table(model: Detector, names: Names = "layers") -> tuple[Entry, ...]:
    """Every key of a checkpoint of this detector."""
    depths = [len(stage.blocks) for stage in model.backbone.layers]
    return (
        *_backbone(depths, names),
        *_neck(len(depths)),
        *(entry for stage in range(model.options.stages) for entry in _heads(model.options, stage)),
    )


def _backbone(depths: list[int], names: Names) -> Iterator[Entry]:
    own = names == "stages"
    attention, (fc1, fc2) = (
        ("attn.w_msa", ("ffn.layers.0.0", "ffn.layers.1"))
        if own
        else ("attn", ("mlp.fc1", "mlp.fc2"))
    )
    merging: Change = "merging" if own else "same"
    patches = "backbone.patch_embed"
    yield from _pair(f"{patches}.{'projection' if own else 'proj'}", f"{patches}.proj")
    yield from _pair(f"{patches}.norm", f"{patches}.norm")
    for i, depth in enumerate(depths):
        there, here = f"backbone.{names}.{i}", f"backbone.layers.{i}"
        for j in range(depth):
            ahead, to = f"{there}.blocks.{j}", f"{here}.blocks.{j}"
            table = "relative_position_bias_table"
            index = "relative_position_index"
            yield from _pair(f"{ahead}.norm1", f"{to}.norm1")
            yield Entry(f"{ahead}.{attention}.{table}", f"{to}.attn.{table}")
            yield Entry(f"{ahead}.{attention}.{index}", f"{to}.attn.{index}", "compared")
            yield from _pair(f"{ahead}.{attention}.qkv", f"{to}.attn.qkv")
            yield from _pair(f"{ahead}.{attention}.proj", f"{to}.attn.proj")
            yield from _pair(f"{ahead}.norm2", f"{to}.norm2")
            yield from _pair(f"{ahead}.{fc1}", f"{to}.mlp.fc1")
            yield from _pair(f"{ahead}.{fc2}", f"{to}.mlp.fc2")
        if i + 1 < len(depths):  # timm merges at the beginning of the next stage
            to = f"backbone.layers.{i + 1}.downsample"
            reduction = "downsample.reduction.weight"
            yield Entry(f"{there}.{reduction}", f"{to}.reduction.weight", merging)
            yield from _pair(f"{there}.downsample.norm", f"{to}.norm", merging)
        yield from _pair(f"backbone.norm{i}", f"backbone.norms.{i}")


def _neck(levels: int) -> Iterator[Entry]:
    for i in range(levels):
        yield from _pair(f"neck.lateral_convs.{i}.conv", f"backbone.fpn.inner_blocks.{i}.0")
        yield from _pair(f"neck.fpn_convs.{i}.conv", f"backbone.fpn.layer_blocks.{i}.0")
    yield from _pair("rpn_head.rpn_conv", "rpn.head.conv.0.0")
    yield from _pair("rpn_head.rpn_cls", "rpn.head.cls_logits")
    yield from _pair("rpn_head.rpn_reg", "rpn.head.bbox_pred")


def _heads(options: DetectorOptions, stage: int) -> Iterator[Entry]:
    number = f".{stage}" if options.cascade else ""
    box, mask = f"roi_head.bbox_head{number}", f"roi_head.mask_head{number}"
    to = f"roi_heads.stages.{stage}" if options.cascade else "roi_heads"
    for i in range(options.box_convs):
        yield Entry(f"{box}.shared_convs.{i}.conv.weight", f"{to}.box_head.{i}.0.weight")
        for part in _BATCH_NORM:
            yield Entry(f"{box}.shared_convs.{i}.bn.{part}", f"{to}.box_head.{i}.1.{part}")
    for i in range(options.box_fcs):
        # behind the convolutions the maps are flattened, and every layer has a ReLU behind it
        place = options.box_convs + 1 + 2 * i
        yield from _pair(f"{box}.shared_fcs.{i}", f"{to}.box_head.{place}")
    deltas: Change = "same" if options.class_agnostic else "background added"
    yield from _pair(f"{box}.fc_cls", f"{to}.box_predictor.cls_score", "background first")
    yield from _pair(f"{box}.fc_reg", f"{to}.box_predictor.bbox_pred", deltas, rows=4)
    for i in range(options.mask_convs):
        yield from _pair(f"{mask}.convs.{i}.conv", f"{to}.mask_head.{i}.0")
    yield from _pair(f"{mask}.upsample", f"{to}.mask_predictor.conv5_mask")
    logits = f"{to}.mask_predictor.mask_fcn_logits"
    yield from _pair(f"{mask}.conv_logits", logits, "background added")


def _pair(source: str, target: str, change: Change = "same", rows: int = 1) -> Iterator[Entry]:
    for part in _BOTH:
        yield Entry(f"{source}.{part}", f"{target}.{part}", change, rows)


def names_in(state: Mapping[str, Tensor]) -> Names:
    """Which names the backbone of a checkpoint has."""
    return "stages" if any(key.startswith("backbone.stages.") for key in state) else "layers"


def options_in(state: Mapping[str, Tensor], where: str) -> dict[str, Any]:
    """The options of the detector that a checkpoint holds, as far as its tensors tell them."""

    def shape(key: str) -> tuple[int, ...]:
        if key not in state:
            raise FormatError(f"{where}: key {key!r} of a Swin detector is missing")
        return tuple(state[key].shape)

    def count(pattern: str) -> int:
        return len({found[1] for key in state if (found := re.fullmatch(pattern, key))})

    names = names_in(state)
    blocks = rf"backbone\.{names}\.{{}}\.blocks\.(\d+)\.norm1\.weight"
    stages = count(rf"backbone\.{names}\.(\d+)\.blocks\.0\.norm1\.weight")
    depths = tuple(count(blocks.format(i)) for i in range(stages))
    table = f"{'attn.w_msa' if names == 'stages' else 'attn'}.relative_position_bias_table"
    tables = [shape(f"backbone.{names}.{i}.blocks.0.{table}") for i in range(max(stages, 1))]
    channels = shape("backbone.norm0.weight")[0]
    cascade = any(key.startswith("roi_head.bbox_head.0.") for key in state)
    box, mask = (f"roi_head.{kind}_head{'.0' if cascade else ''}" for kind in ("bbox", "mask"))
    classes = shape(f"{mask}.conv_logits.weight")[0]
    return {
        "name": SWINS.get((channels, depths), "swin_tiny_patch4_window7_224"),
        "classes": classes,
        "cascade": cascade,
        "embed_dim": channels,
        "depths": depths,
        "num_heads": tuple(heads for _, heads in tables),
        "window_size": (isqrt(tables[0][0]) + 1) // 2,
        "fpn_channels": shape("neck.lateral_convs.0.conv.weight")[0],
        "box_convs": count(rf"{re.escape(box)}\.shared_convs\.(\d+)\.conv\.weight"),
        "box_fcs": count(rf"{re.escape(box)}\.shared_fcs\.(\d+)\.weight"),
        "box_channels": shape(f"{box}.fc_cls.weight")[1],
        "class_agnostic": shape(f"{box}.fc_reg.weight")[0] == 4 and classes > 1,
        "mask_convs": count(rf"{re.escape(mask)}\.convs\.(\d+)\.conv\.weight"),
        "mask_channels": shape(f"{mask}.upsample.weight")[1],
    }


def load_mmdet_state(model: Detector, state: Mapping[str, Tensor], where: str) -> None:
    """Load the tensors of a checkpoint; the first key that does not fit is an error."""
    entries = {entry.source: entry for entry in key_table(model, names_in(state))}
    own = {**model.state_dict(), **dict(model.named_buffers())}
    for key, values in state.items():
        if key not in entries:
            kind = "Cascade Mask R-CNN" if model.options.cascade else "Mask R-CNN"
            raise FormatError(f"{where}: key {key!r} is in no {kind} with a Swin backbone")
        needed = entries[key].reverted(own[entries[key].target])
        if values.shape != needed.shape:
            raise FormatError(
                f"{where}: key {key!r} has shape {tuple(values.shape)}, "
                f"the detector needs {tuple(needed.shape)}"
            )
        if entries[key].change == "compared" and not torch.equal(values.to(needed), needed):
            raise FormatError(f"{where}: key {key!r} has relative positions in another order")
    for key, entry in entries.items():
        if key not in state and entry.change != "compared":
            raise FormatError(f"{where}: key {key!r} of the detector is missing")
    converted = {
        entries[key].target: entries[key].converted(values)
        for key, values in state.items()
        if entries[key].change != "compared"
    }
    load_state(model, converted, where)


def mmdet_state(model: nn.Module, names: Names = "layers") -> dict[str, Tensor]:
    """The tensors of a detector under the keys of mmdetection."""
    assert isinstance(model, Detector), "only detectors have these keys"
    own = {**model.state_dict(), **dict(model.named_buffers())}
    return {
        entry.source: entry.reverted(own[entry.target]).clone() for entry in key_table(model, names)
    }
