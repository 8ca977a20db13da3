"""A Swin of timm and a feature pyramid, for images of any size."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import Tensor, nn
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelMaxPool

from lampq.detection.options import DetectorOptions
from lampq.errors import ConfigError
from lampq.graph.windows import padded_swin_block

# own architectures; a name that is not here is one of timm
OWN: dict[str, dict[str, Any]] = {
    "scene_swin": {
        "patch_size": 4,
        "embed_dim": 48,
        "depths": (2, 2, 2),
        "num_heads": (2, 4, 8),
        "window_size": 4,
    },
}
_SIZE = 224  # of the positions that timm sets up and that are never used


def _swin(options: DetectorOptions) -> Any:
    import timm
    from timm.models.swin_transformer import SwinTransformer

    named: dict[str, Any] = {
        name: getattr(options, name)
        for name in ("embed_dim", "depths", "num_heads", "window_size")
        if getattr(options, name) is not None
    }
    common: dict[str, Any] = {
        "img_size": _SIZE,
        "in_chans": len(options.image_mean),
        "num_classes": 0,
        "drop_path_rate": options.drop_path,
        "always_partition": True,  # small maps are padded to a window, and shifted too
        "strict_img_size": False,
    }
    if options.name in OWN:
        return SwinTransformer(**{**OWN[options.name], **named, **common})
    if options.name not in timm.list_models("swin_*", module="swin_transformer"):
        known = ", ".join([*OWN, "swin_tiny_patch4_window7_224", "swin_small_patch4_window7_224"])
        raise ConfigError(
            f"{options.name!r} is no Swin of timm; a detector has one of these names: {known}, ..."
        )
    return timm.create_model(options.name, pretrained=False, **named, **common)


class SwinFPN(nn.Module):
    """The levels of a feature pyramid over the normed outputs of the stages of a Swin.

    Attributes:
        strides: Pixels of the input per place of each level, the pooled last one included.
        out_channels: Channels of every level.
    """

    def __init__(self, options: DetectorOptions) -> None:
        super().__init__()
        swin = _swin(options)
        block = padded_swin_block()
        for stage in swin.layers:
            stage.blocks = nn.Sequential(*(block(original) for original in stage.blocks))
        self.patch_embed, self.layers = swin.patch_embed, swin.layers
        channels = [level["num_chs"] for level in swin.feature_info]
        reductions = [level["reduction"] for level in swin.feature_info]
        self.strides = (*reductions, 2 * reductions[-1])
        self.out_channels = options.fpn_channels
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in channels)
        self.fpn = FeaturePyramidNetwork(
            channels, options.fpn_channels, extra_blocks=LastLevelMaxPool()
        )

    def stage_outputs(self, x: Tensor) -> list[Tensor]:
        """The normed output of each stage, (images, channels, rows, columns)."""
        outputs = []
        x = self.patch_embed(x)
        for stage, norm in zip(self.layers, self.norms, strict=True):
            x = stage(x)
            outputs.append(norm(x).permute(0, 3, 1, 2).contiguous())
        return outputs

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """The levels by name: "0", "1", ... and "pool"."""
        outputs = self.stage_outputs(x)
        levels: dict[str, Tensor] = self.fpn(
            OrderedDict((str(i), output) for i, output in enumerate(outputs))
        )
        return levels
