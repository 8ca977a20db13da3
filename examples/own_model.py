"""Quantize a model that lampq does not know, by telling it which layer plays which role.

The model is trained for a few seconds on the bundled pictures, so that it has something to lose.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lampq
from lampq import LayerRole, RolePattern
from lampq.evaluate import predict, top1
from lampq.models import bundled_samples


class Block(nn.Module):
    """Attention and a small network, each behind a norm and with a shortcut."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(channels)
        self.to_qkv = nn.Linear(channels, 3 * channels)
        self.to_out = nn.Linear(channels, channels)
        self.before_mlp = nn.LayerNorm(channels)
        self.up = nn.Linear(channels, 4 * channels)
        self.down = nn.Linear(4 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (images, tokens, channels) in and out."""
        q, k, v = self.to_qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        mixed = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)))
        x = x + self.to_out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.before_mlp(x))))


class SmallTransformer(nn.Module):
    """A classifier of 28 x 28 pictures."""

    def __init__(self, channels: int = 48, depth: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, channels, kernel_size=7, stride=7)
        self.position = nn.Parameter(0.02 * torch.randn(16, channels))
        self.body = nn.ModuleList(Block(channels, heads=4) for _ in range(depth))
        self.last_norm = nn.LayerNorm(channels)
        self.classifier = nn.Linear(channels, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (images, classes)."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.position
        for block in self.body:
            x = block(x)
        logits: Tensor = self.classifier(self.last_norm(x).mean(dim=1))
        return logits


# the text up to the last * names the block; norm is the LayerNorm in it that feeds the layer
PATTERNS = (
    RolePattern("patches", LayerRole.PATCH_EMBED),
    RolePattern("body.*.to_qkv", LayerRole.QKV, norm="before_attention"),
    RolePattern("body.*.to_out", LayerRole.PROJ),
    RolePattern("body.*.up", LayerRole.FC1, norm="before_mlp"),
    RolePattern("body.*.down", LayerRole.FC2),
    RolePattern("classifier", LayerRole.HEAD),
)


def trained(samples: lampq.Samples, steps: int = 150) -> nn.Module:
    """The model after a short training."""
    torch.manual_seed(0)
    model = SmallTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    labels = samples.require_labels("training")
    for _ in range(steps):
        index = torch.randint(len(samples), (64,))
        loss = F.cross_entropy(model(samples.inputs(index)), labels[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def main() -> None:
    """Train, quantize, save, and load with the architecture given."""
    calibration, test = bundled_samples("calib"), bundled_samples("eval").subset(500, seed=0)
    labels = test.require_labels("an accuracy")
    model = trained(calibration)
    warnings.simplefilter("ignore", UserWarning)  # the result carries them as notices
    result = lampq.quantize(
        model, calibration, bits=3, patterns=PATTERNS, method="repq", images=128, exchanges=4
    )
    for notice in result.notices:
        print(f"note: {notice}")
    print(f"float  {top1(predict(model, test), labels):6.2f} %")
    print(f"mixed  {top1(predict(result.model, test), labels):6.2f} %")
    for name, bits in result.plan.items():
        print(f"  {name:<16} {bits.weight}")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        result.save(path)
        again = lampq.load(path, model=SmallTransformer())
        x = test.inputs(slice(0, 4))
        print(f"same answers after loading: {torch.equal(again(x), result.model(x))}")


if __name__ == "__main__":
    main()
