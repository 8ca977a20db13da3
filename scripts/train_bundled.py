"""Train the two bundled Fashion-MNIST models and write their weights and images.

    data=/usr/share/datasets/fashion-mnist out=runs/bundled
    python scripts/train_bundled.py images --data $data --out $out
    python scripts/train_bundled.py teacher --data $data --out $out --epochs 4 --threads 2
    python scripts/train_bundled.py vit --data $data --out $out --epochs 14
    python scripts/train_bundled.py swin --data $data --out $out --epochs 18

The data folder holds the four original ``*-ubyte.gz`` files (Debian: ``dataset-fashion-mnist``).
Training resumes from ``<out>/<name>.state.pt`` when that file exists. The transformers learn from
the labels and from the answers of a small convolutional teacher, in small batches, and start with
position information that is not small: each of these shortens the training a lot.
"""

from __future__ import annotations

import argparse
import gzip
import math
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from lampq.models import FASHION_MEAN, FASHION_STD, bundled_architecture

JOBS = ("images", "teacher", "vit", "swin")
HEAT = 2.0  # temperature of the teacher's answers


def read_idx(path: Path) -> np.ndarray:
    """The array stored in one gzipped IDX file."""
    raw = gzip.decompress(path.read_bytes())
    dims = raw[3]
    shape = tuple(np.frombuffer(raw, ">i4", dims, 4))
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * dims).reshape(shape)


def load(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """Images (n, 28, 28) as bytes and labels of the split "train" or "t10k"."""
    images = read_idx(folder / f"{split}-images-idx3-ubyte.gz")
    labels = read_idx(folder / f"{split}-labels-idx1-ubyte.gz")
    return torch.from_numpy(images.copy()), torch.from_numpy(labels.copy()).long()


def normalise(images: Tensor) -> Tensor:
    """Network input (n, 1, 28, 28) of byte images."""
    return ((images.float() / 255 - FASHION_MEAN[0]) / FASHION_STD[0])[:, None]


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Random flip and shift by up to one pixel, per image."""
    n = len(images)
    flip = torch.rand(n, generator=generator) < 0.5
    images = torch.where(flip[:, None, None, None], images.flip(-1), images)
    padded = F.pad(images, (1, 1, 1, 1), value=float(images.min()))
    dy, dx = torch.randint(0, 3, (2, n), generator=generator)
    rows = (dy[:, None] + torch.arange(28))[:, None, :, None]
    columns = (dx[:, None] + torch.arange(28))[:, None, None, :]
    return padded[torch.arange(n)[:, None, None, None], 0, rows, columns]


def teacher() -> nn.Module:
    """A small convolutional network; it learns these pictures much faster than a transformer."""

    def stage(inputs: int, outputs: int) -> list[nn.Module]:
        conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return [conv, nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *stage(1, 32),
        *stage(32, 32),
        nn.MaxPool2d(2),
        *stage(32, 64),
        *stage(64, 64),
        nn.MaxPool2d(2),
        *stage(64, 128),
        *stage(128, 128),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(128, 10),
    )


def student(name: str) -> nn.Module:
    """A bundled architecture with Xavier weights and strong position information."""
    model = bundled_architecture(f"fashion_{name}", weight_init="jax")
    with torch.no_grad():
        for key, value in model.named_parameters():
            if key == "pos_embed":
                value[0, 1:] = 0.7 * waves(7, value.shape[-1])
            elif key.endswith("relative_position_bias_table"):
                value.normal_()
    return model


def waves(side: int, channels: int) -> Tensor:
    """Sines and cosines of the two coordinates, (side * side, channels)."""
    rates = math.pi / 2 * side ** -(torch.arange(channels // 4) / (channels // 4))
    y, x = (torch.arange(side * side) // side, torch.arange(side * side) % side)
    parts = [wave(place[:, None] * rates) for place in (y, x) for wave in (torch.sin, torch.cos)]
    return torch.cat(parts, dim=1)


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of images classified right."""
    model.eval()
    hits = sum(
        int((model(normalise(x)).argmax(1) == y).sum())
        for x, y in zip(images.split(500), labels.split(500), strict=True)
    )
    return hits / len(labels)


def train(name: str, data: Path, out: Path, *, epochs: int, batch: int, rate: float) -> None:
    """Train, report the test accuracy after every epoch, and keep the last state."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    images, labels = load(data, "train")
    test_images, test_labels = load(data, "t10k")
    model = teacher() if name == "teacher" else student(name)
    hints = None if name == "teacher" else answers(out / "teacher.state.pt", images)
    decayed = [p for k, p in model.named_parameters() if p.ndim > 1 and "pos" not in k]
    others = [p for k, p in model.named_parameters() if p.ndim <= 1 or "pos" in k]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, weight_decay=0.05)
    steps = epochs * (len(images) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=steps, pct_start=0.1
    )
    state_path, first = out / f"{name}.state.pt", 0
    if state_path.exists():
        state = torch.load(state_path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        generator.set_state(state["generator"])
        first = state["epoch"]
    for epoch in range(first, epochs):
        start, model = time.perf_counter(), model.train()
        order = torch.randperm(len(images), generator=generator)[: len(images) // batch * batch]
        for index in order.split(batch):
            logits = model(augment(normalise(images[index]), generator))
            loss = F.cross_entropy(logits, labels[index])
            if hints is not None:
                soft = F.log_softmax(logits / HEAT, 1)
                loss = (loss + HEAT**2 * F.kl_div(soft, hints[index], reduction="batchmean")) / 2
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        score = accuracy(model, test_images, test_labels)
        took = time.perf_counter() - start
        print(f"{name} epoch {epoch + 1}/{epochs} test {score:.4f} {took:.0f} s", flush=True)
        torch.save(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
                "generator": generator.get_state(),
                "epoch": epoch + 1,
            },
            state_path,
        )
    if name != "teacher":
        write_weights(name, model, out, test_images, test_labels, epochs)


@torch.no_grad()
def answers(state: Path, images: Tensor) -> Tensor:
    """The teacher's softened probabilities for every image, flipped and not."""
    model = teacher()
    model.load_state_dict(torch.load(state, weights_only=True)["model"])
    model.eval()
    parts = [model(x) + model(x.flip(-1)) for x in map(normalise, images.split(500))]
    return (torch.cat(parts) / 2 / HEAT).softmax(1)


def write_weights(
    name: str, model: nn.Module, out: Path, images: Tensor, labels: Tensor, epochs: int
) -> None:
    """Write float16 weights and report the accuracy that they have."""
    halves = {
        key: value.half() if value.is_floating_point() else value
        for key, value in model.state_dict().items()
        if not key.endswith(("relative_position_index", "attn_mask"))
    }
    model.load_state_dict(halves, strict=False)
    score = accuracy(model, images, labels)
    print(f"{name} float16 weights: test {score:.4f}")
    target = out / f"fashion_{name}.safetensors"
    save_file(halves, target, metadata={"test_top1": f"{100 * score:.2f}", "epochs": str(epochs)})


def write_images(data: Path, out: Path) -> None:
    """Write 1,024 training images and the first 2,000 test images as one compressed archive."""
    images, labels = load(data, "train")
    pick = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:1024]
    test_images, test_labels = load(data, "t10k")
    np.savez_compressed(
        out / "fashion_images.npz",
        calib_images=images[pick].numpy(),
        calib_labels=labels[pick].numpy().astype(np.uint8),
        eval_images=test_images[:2000].numpy(),
        eval_labels=test_labels[:2000].numpy().astype(np.uint8),
    )


def main() -> None:
    """Read the command line and do one of the four jobs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    if options.job == "images":
        write_images(options.data, options.out)
    else:
        train(
            options.job,
            options.data,
            options.out,
            epochs=options.epochs,
            batch=options.batch,
            rate=options.rate,
        )


if __name__ == "__main__":
    main()
