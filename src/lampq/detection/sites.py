"""What is quantized in a detector: the layers of its backbone, and all that is behind it."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from lampq.graph.discover import discover
from lampq.graph.families import TIMM, RolePattern
from lampq.types import LayerRole, LayerSpec, ModelGraph

BACKBONE = (*TIMM, RolePattern("backbone.patch_embed.proj", LayerRole.PATCH_EMBED))
# parts behind the backbone, by the beginning of their names
PARTS = {
    "backbone.fpn.": LayerRole.NECK,
    "rpn.": LayerRole.RPN,
    "roi_heads.": LayerRole.ROI_HEAD,
}


def is_layer(module: nn.Module) -> bool:
    """Whether a layer is a linear map of tokens: linear, a convolution, or a patch per pixel."""
    if isinstance(module, nn.Conv2d):
        plain = module.groups == 1 and tuple(module.dilation) == (1, 1)
        return plain and not isinstance(module.padding, str) and module.padding_mode == "zeros"
    if isinstance(module, nn.ConvTranspose2d):
        return (
            module.groups == 1
            and tuple(module.kernel_size) == tuple(module.stride)
            and tuple(module.padding) == tuple(module.output_padding) == (0, 0)
            and tuple(module.dilation) == (1, 1)
        )
    return isinstance(module, nn.Linear)


def behind_backbone(model: nn.Module) -> tuple[LayerSpec, ...]:
    """The layers of neck, region proposals and heads, in the order of the modules."""
    return tuple(
        LayerSpec(name, role, -1, module.weight.numel())
        for name, module in model.named_modules()
        for part, role in PARTS.items()
        if name.startswith(part) and is_layer(module)
    )


def detector_graph(model: nn.Module, *, heads: bool = True) -> ModelGraph:
    """The sites of a detector in its explicit form; without ``heads`` those of its backbone."""
    graph = discover(model, BACKBONE)
    return replace(graph, layers=(*graph.layers, *behind_backbone(model))) if heads else graph
