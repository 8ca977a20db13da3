r"""Train one of the two bundled Fashion-MNIST models and write its weights and images.

    data=/usr/share/datasets/fashion-mnist out=runs/bundled
    python scripts/train_bundled.py images --data $data --out $out
    python scripts/train_bundled.py swin --data $data --out $out --epochs 10 --erase 4
    python scripts/train_bundled.py vit --data $data --out $out --epochs 16 --stop-after 5
    python scripts/train_bundled.py vit --data $data --out $out/second --epochs 9 --rate 1e-3 \\
        --erase 0 --init $out/vit.state.pt

The data folder holds the four original ``*-ubyte.gz`` files (Debian: ``dataset-fashion-mnist``).
Training resumes from ``<out>/<name>.state.pt`` when that file exists. The ViT is trained in two
parts: five epochs with strong augmentation, then nine without erasing at half the rate.
"""

from __future__ import annotations

import argparse
import gzip
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from lampq.models import FASHION_MEAN, FASHION_STD, bundled_architecture

JOBS = ("vit", "swin", "images")


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


def augment(images: Tensor, generator: torch.Generator, largest: int) -> Tensor:
    """Random flip, shift by up to two pixels and one erased square, per image."""
    n = len(images)
    flip = torch.rand(n, generator=generator) < 0.5
    images = torch.where(flip[:, None, None, None], images.flip(-1), images)
    padded = F.pad(images, (2, 2, 2, 2), value=float(images.min()))
    dy, dx = torch.randint(0, 5, (2, n), generator=generator)
    rows = (dy[:, None] + torch.arange(28))[:, None, :, None]
    columns = (dx[:, None] + torch.arange(28))[:, None, None, :]
    shifted = padded[torch.arange(n)[:, None, None, None], 0, rows, columns]
    size = torch.randint(0, largest + 1, (n,), generator=generator)
    top, left = torch.randint(0, 28, (2, n), generator=generator)
    y = torch.arange(28)[None, :, None]
    x = torch.arange(28)[None, None, :]
    inside_rows = (y >= top[:, None, None]) & (y < (top + size)[:, None, None])
    inside_columns = (x >= left[:, None, None]) & (x < (left + size)[:, None, None])
    return shifted.masked_fill((inside_rows & inside_columns)[:, None], 0.0)


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of images classified right."""
    model.eval()
    hits = sum(
        int((model(normalise(x)).argmax(1) == y).sum())
        for x, y in zip(images.split(500), labels.split(500), strict=True)
    )
    return hits / len(labels)


def train(
    name: str,
    data: Path,
    out: Path,
    *,
    epochs: int,
    batch: int,
    rate: float,
    erase: int,
    stop_after: int | None,
    init: Path | None,
) -> None:
    """Train, report the test accuracy after every epoch, and write float16 weights."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = bundled_architecture(f"fashion_{name}", drop_path_rate=0.05)
    images, labels = load(data, "train")
    test_images, test_labels = load(data, "t10k")
    steps = epochs * (len(images) // batch)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=steps, pct_start=0.2
    )
    if init is not None:
        model.load_state_dict(torch.load(init, weights_only=True)["model"])
    state_path, first = out / f"{name}.state.pt", 0
    if state_path.exists():
        state = torch.load(state_path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        generator.set_state(state["generator"])
        first = state["epoch"]
    for epoch in range(first, min(epochs, stop_after or epochs)):
        start, model = time.perf_counter(), model.train()
        order = torch.randperm(len(images), generator=generator)[: len(images) // batch * batch]
        for index in order.split(batch):
            inputs = augment(normalise(images[index]), generator, erase)
            loss = F.cross_entropy(model(inputs), labels[index], label_smoothing=0.05)
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
    halves = {
        key: value.half() if value.is_floating_point() else value
        for key, value in model.state_dict().items()
        if not key.endswith(("relative_position_index", "attn_mask"))
    }
    model.load_state_dict(halves, strict=False)
    score = accuracy(model, test_images, test_labels)
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
    """Read the command line and do one of the three jobs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--erase", type=int, default=10, help="largest erased square, in pixels")
    parser.add_argument("--stop-after", type=int, help="end before the schedule does")
    parser.add_argument("--init", type=Path, help="state file to start from")
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
            erase=options.erase,
            stop_after=options.stop_after,
            init=options.init,
        )


if __name__ == "__main__":
    main()
