"""The published detectors once more, small and by the book, under their own names.

Written from the description of the architecture, with none of the code under test. Two backbones:
``layers`` as the authors of Swin have it, ``stages`` as mmdetection has it.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES, EMBED, DEPTHS, HEADS, WINDOW = 3, 8, (2, 2, 1, 1), (1, 2, 2, 4), 4
NECK, BOX, MASK = 8, 12, 8
STRIDES = (4, 8, 16, 32, 64)
STDS = ((0.1, 0.1, 0.2, 0.2), (0.05, 0.05, 0.1, 0.1), (0.033, 0.033, 0.067, 0.067))


def _index_by_steps() -> Tensor:
    """Relative positions of a window, counted one pair after another."""
    places = list(itertools.product(range(WINDOW), repeat=2))
    rows = [
        [(a - c + WINDOW - 1) * (2 * WINDOW - 1) + (b - d + WINDOW - 1) for c, d in places]
        for a, b in places
    ]
    return torch.tensor(rows)


def _index_by_flip() -> Tensor:
    """The same by sums of two sequences, one of them backwards."""
    line = torch.arange(WINDOW)
    flat = (line[:, None] * (2 * WINDOW - 1) + line).reshape(1, -1)
    return (flat + flat.T).flip(1).contiguous()


class Windows(nn.Module):
    def __init__(self, channels: int, heads: int, index: Tensor) -> None:
        super().__init__()
        self.heads = heads
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * WINDOW - 1) ** 2, heads))
        self.register_buffer("relative_position_index", index)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.proj = nn.Linear(channels, channels)

    def forward(self, x: Tensor, region: Tensor) -> Tensor:
        """Windows (count, tokens, channels), each token with the number of its region."""
        count, tokens, channels = x.shape
        q, k, v = self.qkv(x).view(count, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        bias = self.relative_position_bias_table[self.relative_position_index].permute(2, 0, 1)
        scores = q @ k.mT / math.sqrt(channels // self.heads) + bias
        apart = region[:, None, :, None] != region[:, None, None, :]
        scores = scores - 100.0 * apart
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))


class Holder(nn.Module):
    """A module that only names others."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


class Block(nn.Module):
    def __init__(self, channels: int, heads: int, shift: int, own: bool) -> None:
        super().__init__()
        self.shift, self.own = shift, own
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        index = _index_by_flip() if own else _index_by_steps()
        windows = Windows(channels, heads, index)
        wide, narrow = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        if own:
            self.attn = Holder(w_msa=windows)
            self.ffn = Holder(layers=nn.Sequential(nn.Sequential(wide, nn.GELU()), narrow))
        else:
            self.attn = windows
            self.mlp = Holder(fc1=wide, fc2=narrow)

    def _attend(self, x: Tensor) -> Tensor:
        images, rows, columns, channels = x.shape
        x = F.pad(x, (0, 0, 0, -columns % WINDOW, 0, -rows % WINDOW))
        down, across = x.shape[1] // WINDOW, x.shape[2] // WINDOW
        region = torch.zeros(x.shape[1:3])
        if self.shift:
            x = x.roll((-self.shift, -self.shift), (1, 2))
            cut = (slice(0, -WINDOW), slice(-WINDOW, -self.shift), slice(-self.shift, None))
            for number, (a, b) in enumerate(itertools.product(cut, cut)):
                region[a, b] = number

        def windowed(values: Tensor) -> Tensor:
            split = values.reshape(-1, down, WINDOW, across, WINDOW, values.shape[-1])
            return split.transpose(2, 3).reshape(-1, WINDOW * WINDOW, values.shape[-1])

        windows = self.attn.w_msa if self.own else self.attn
        regions = windowed(region[None, ..., None]).squeeze(-1).repeat(images, 1)
        x = windows(windowed(x), regions)
        x = x.view(images, down, across, WINDOW, WINDOW, channels).transpose(2, 3)
        x = x.reshape(images, down * WINDOW, across * WINDOW, channels)
        return x.roll((self.shift, self.shift), (1, 2))[:, :rows, :columns]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.norm1(x))
        y = self.norm2(x)
        if self.own:
            return x + self.ffn.layers(y)
        return x + self.mlp.fc2(F.gelu(self.mlp.fc1(y)))


class Merge(nn.Module):
    def __init__(self, channels: int, own: bool) -> None:
        super().__init__()
        self.own = own
        self.norm = nn.LayerNorm(4 * channels)
        self.reduction = nn.Linear(4 * channels, 2 * channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
        rows, columns = x.shape[1] // 2, x.shape[2] // 2
        if self.own:
            unfolded = F.unfold(x.permute(0, 3, 1, 2), 2, stride=2).mT
            merged = unfolded.view(len(x), rows, columns, -1)
        else:
            corners = [x[:, a::2, b::2] for a, b in ((0, 0), (1, 0), (0, 1), (1, 1))]
            merged = torch.cat(corners, dim=-1)
        return self.reduction(self.norm(merged))


class Swin(nn.Module):
    def __init__(self, names: str) -> None:
        super().__init__()
        own, self.names = names == "stages", names
        patches = nn.Conv2d(3, EMBED, 4, 4)
        named = {"projection" if own else "proj": patches}
        self.patch_embed = Holder(**named, norm=nn.LayerNorm(EMBED))
        self.patches = [patches]  # a list: not a second name
        stages = nn.ModuleList()
        for i, (depth, heads) in enumerate(zip(DEPTHS, HEADS, strict=True)):
            channels = EMBED * 2**i
            blocks = [Block(channels, heads, WINDOW // 2 * (j % 2), own) for j in range(depth)]
            stage = Holder(blocks=nn.ModuleList(blocks))
            if i + 1 < len(DEPTHS):
                stage.downsample = Merge(channels, own)
            stages.append(stage)
            self.add_module(f"norm{i}", nn.LayerNorm(channels))
        self.add_module(names, stages)

    def forward(self, image: Tensor) -> list[Tensor]:
        x = self.patch_embed.norm(self.patches[0](image).permute(0, 2, 3, 1))
        outputs = []
        for i, stage in enumerate(getattr(self, self.names)):
            for block in stage.blocks:
                x = block(x)
            outputs.append(getattr(self, f"norm{i}")(x).permute(0, 3, 1, 2))
            if hasattr(stage, "downsample"):
                x = stage.downsample(x)
        return outputs


def _conv(inputs: int, outputs: int, size: int) -> Holder:
    return Holder(conv=nn.Conv2d(inputs, outputs, size, padding=size // 2))


class Neck(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [EMBED * 2**i for i in range(4)]
        self.lateral_convs = nn.ModuleList(_conv(width, NECK, 1) for width in widths)
        self.fpn_convs = nn.ModuleList(_conv(NECK, NECK, 3) for _ in widths)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        sides = [side.conv(x) for side, x in zip(self.lateral_convs, maps, strict=True)]
        for i in (2, 1, 0):
            sides[i] = sides[i] + F.interpolate(sides[i + 1], size=sides[i].shape[-2:])
        levels = [out.conv(x) for out, x in zip(self.fpn_convs, sides, strict=True)]
        return [*levels, levels[-1][:, :, ::2, ::2]]  # pooled with a kernel of one


class BoxHead(nn.Module):
    def __init__(self, convs: int, fcs: int, agnostic: bool) -> None:
        super().__init__()
        if convs:
            self.shared_convs = nn.ModuleList(
                Holder(
                    conv=nn.Conv2d(NECK, NECK, 3, padding=1, bias=False), bn=nn.BatchNorm2d(NECK)
                )
                for _ in range(convs)
            )
        widths = [NECK * 49, *[BOX] * fcs]
        self.shared_fcs = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.fc_cls = nn.Linear(BOX, CLASSES + 1)
        self.fc_reg = nn.Linear(BOX, 4 if agnostic else 4 * CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits with background last, and deltas of the classes without background."""
        for part in getattr(self, "shared_convs", ()):
            x = part.bn(part.conv(x)).relu()
        x = x.flatten(1)
        for layer in self.shared_fcs:
            x = layer(x).relu()
        deltas = self.fc_reg(x).view(len(x), -1, 4)
        return self.fc_cls(x), deltas.expand(-1, CLASSES, -1)


class MaskHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(_conv(width, MASK, 3) for width in (NECK, MASK))
        self.upsample = nn.ConvTranspose2d(MASK, MASK, 2, 2)
        self.conv_logits = nn.Conv2d(MASK, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.convs:
            x = part.conv(x).relu()
        return self.conv_logits(self.upsample(x).relu())


class Reference(nn.Module):
    """A detector under the names of mmdetection."""

    def __init__(
        self, names: str, *, cascade: bool = False, convs: int = 0, agnostic: bool = False
    ) -> None:
        super().__init__()
        self.backbone, self.neck = Swin(names), Neck()
        self.rpn_head = Holder(
            rpn_conv=nn.Conv2d(NECK, NECK, 3, padding=1),
            rpn_cls=nn.Conv2d(NECK, 3, 1),
            rpn_reg=nn.Conv2d(NECK, 12, 1),
        )

        def head() -> BoxHead:
            return BoxHead(convs, 1 if convs else 2, agnostic)

        if cascade:
            boxes = nn.ModuleList(head() for _ in range(3))
            masks = nn.ModuleList(MaskHead() for _ in range(3))
            self.roi_head = Holder(bbox_head=boxes, mask_head=masks)
        else:
            self.roi_head = Holder(bbox_head=head(), mask_head=MaskHead())
        for name, values in self.state_dict().items():
            if name.endswith("running_var"):
                values.uniform_(0.5, 2.0)
            elif values.is_floating_point():
                spread = 0.15 if values.dim() > 1 else 0.3
                values.copy_(values + spread * torch.randn(values.shape))
        self.eval()

    def levels(self, image: Tensor) -> list[Tensor]:
        return self.neck(self.backbone(image))

    def proposals(self, levels: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Objectness and box of every anchor of the first image, level by level."""
        scores, boxes = [], []
        for x, stride in zip(levels, STRIDES, strict=True):
            y = self.rpn_head.rpn_conv(x).relu()
            objectness, deltas = self.rpn_head.rpn_cls(y)[0], self.rpn_head.rpn_reg(y)[0]
            for row, column, shape in itertools.product(
                range(x.shape[2]), range(x.shape[3]), range(3)
            ):
                tall = math.sqrt((0.5, 1.0, 2.0)[shape])
                wide, high = 8 * stride / tall, 8 * stride * tall
                anchor = [
                    column * stride - wide / 2,
                    row * stride - high / 2,
                    column * stride + wide / 2,
                    row * stride + high / 2,
                ]
                delta = deltas[4 * shape : 4 * shape + 4, row, column]
                scores.append(objectness[shape, row, column])
                boxes.append(decoded(torch.tensor([anchor]), delta[None], (1.0, 1.0, 1.0, 1.0))[0])
        return torch.stack(scores), torch.stack(boxes)


def decoded(boxes: Tensor, deltas: Tensor, stds: tuple[float, ...]) -> Tensor:
    """Boxes moved by deltas: centres by parts of the size, sizes by their logarithm."""
    deltas = deltas * torch.tensor(stds)
    size = boxes[:, 2:] - boxes[:, :2]
    centre = (boxes[:, :2] + boxes[:, 2:]) / 2 + deltas[:, :2] * size
    half = size * deltas[:, 2:].clamp(max=math.log(1000 / 16)).exp() / 2
    return torch.cat([centre - half, centre + half], dim=1)


def pooled(levels: list[Tensor], box: Tensor, size: int) -> Tensor:
    """One region of the first image, (channels, size, size), sample by sample."""
    width, height = float(box[2] - box[0]), float(box[3] - box[1])
    level = min(max(math.floor(math.log2(math.sqrt(width * height) / 56 + 1e-6)), 0), 3)
    x, stride = levels[level][0], STRIDES[level]
    left, top = float(box[0]) / stride - 0.5, float(box[1]) / stride - 0.5
    down, across = height / stride / size, width / stride / size
    rows, columns = math.ceil(down), math.ceil(across)

    def value(y: float, z: float) -> Tensor:
        if y < -1 or z < -1 or y > x.shape[1] or z > x.shape[2]:
            return x.new_zeros(x.shape[0])
        y, z = max(y, 0.0), max(z, 0.0)
        a, b = min(int(y), x.shape[1] - 1), min(int(z), x.shape[2] - 1)
        c, d = min(a + 1, x.shape[1] - 1), min(b + 1, x.shape[2] - 1)
        y, z = (y - a if a < x.shape[1] - 1 else 0.0), (z - b if b < x.shape[2] - 1 else 0.0)
        above = x[:, a, b] * (1 - z) + x[:, a, d] * z
        below = x[:, c, b] * (1 - z) + x[:, c, d] * z
        return above * (1 - y) + below * y

    out = x.new_zeros(x.shape[0], size, size)
    for i, j in itertools.product(range(size), repeat=2):
        samples = [
            value(top + (i + (a + 0.5) / rows) * down, left + (j + (b + 0.5) / columns) * across)
            for a, b in itertools.product(range(rows), range(columns))
        ]
        out[:, i, j] = torch.stack(samples).mean(0)
    return out
