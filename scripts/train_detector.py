"""Train the example detector on made scenes of Fashion-MNIST items, and write its weights.

    data=/usr/share/datasets/fashion-mnist out=runs/detector
    python scripts/train_detector.py pretrain --data $data --out $out
    python scripts/train_detector.py train --data $data --out $out
    python scripts/train_detector.py score --weights $out/scene_swin.safetensors
    python scripts/train_detector.py score --weights $out/scene_swin.safetensors --data $data
    python scripts/train_detector.py scenes --out $out/scenes --split eval --count 500

The data folder holds the four original ``*-ubyte.gz`` files (Debian: ``dataset-fashion-mnist``).
``pretrain`` teaches the backbone to name single items; ``train`` starts from it. Both resume from
``<out>/<job>.state.pt``. Every scene is new: it depends on the seed and its number alone. Items
of the training split are for training, those of the test split for the scores. ``score`` takes the
bundled scenes, or with ``--data`` scenes of the test items that are not bundled.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from train_bundled import load

from lampq.detection.ap import CocoScores, average_precision, detect
from lampq.detection.coco import write_coco
from lampq.detection.models import Detector, detector
from lampq.detection.samples import DetectionSamples
from lampq.detection.scenes import NAMES, Items, SceneStyle, bundled_scenes, make_scenes, scenes
from lampq.models import load_state, read_weights

JOBS = ("pretrain", "train", "score", "scenes")
SINGLE = SceneStyle(size=48, items=(1, 1), clutter=(0, 2), edge=(32, 48))
RISE, FALL = 200, 0.4  # steps of the rise, and share of the steps in which the rate falls
SEEDS = {"pretrain": 1, "train": 2, "test": 3}
BUNDLED = 2000  # the first test items


def items(data: Path, split: str) -> Items:
    """Single items of the split "train" or "t10k"."""
    images, labels = load(data, split)
    return Items(images.numpy(), labels.numpy())


def model_of(options: argparse.Namespace) -> Detector:
    """The detector with random weights that learn fast.

    As for the bundled models: Xavier weights, and position information that is not small.
    """
    torch.manual_seed(options.seed)
    model = detector("scene_swin", classes=len(NAMES), cascade=options.cascade)
    for key, value in model.backbone.named_parameters():
        if key.endswith("relative_position_bias_table"):
            nn.init.normal_(value)
        elif key.startswith("layers") and value.ndim == 2:
            nn.init.xavier_uniform_(value)
    return model


class Course:
    """Optimizer, rates and a state file, for a number of steps.

    The rate rises over the first steps, stays, and falls to zero over the last part. A run that is
    resumed before that part may have more steps, or fewer.
    """

    def __init__(self, model: nn.Module, options: argparse.Namespace) -> None:
        self.model, self.steps = model, options.steps
        name = options.job + ("_cascade" if options.cascade else "")
        self.path = options.out / f"{name}.state.pt"
        decayed = [p for k, p in model.named_parameters() if p.ndim > 1 and "position" not in k]
        others = [p for k, p in model.named_parameters() if p.ndim <= 1 or "position" in k]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=options.rate, weight_decay=0.05)
        self.rate, self.done = options.rate, 0
        self.parts = {"model": model, "optimizer": self.optimizer}
        if self.path.exists():
            state = torch.load(self.path, weights_only=True)
            for name, part in self.parts.items():
                part.load_state_dict(state[name])
            torch.set_rng_state(state["generator"])
            self.done = state["step"]
        self.first = self.done

    def step(self, loss: Tensor) -> None:
        """Follow the gradient of the loss."""
        self.done += 1
        left = (self.steps - self.done) / (FALL * self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * max(0.0, min(1.0, self.done / RISE, left))
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def save(self) -> None:
        """Write the state; the file is there whole or not at all."""
        state: dict[str, Any] = {name: part.state_dict() for name, part in self.parts.items()}
        temporary = self.path.with_suffix(".tmp")
        torch.save({**state, "generator": torch.get_rng_state(), "step": self.done}, temporary)
        temporary.replace(self.path)


class Log:
    """Means of losses since the last line."""

    def __init__(self, first: int, steps: int) -> None:
        self.first, self.steps = first, steps
        self.sums: dict[str, float] = {}
        self.count, self.start = 0, time.perf_counter()

    def add(self, losses: dict[str, Tensor]) -> None:
        """Count the losses of one step."""
        self.count += 1
        for name, loss in losses.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(loss.detach())

    def line(self, step: int) -> None:
        """Print the means, and the time left."""
        took = time.perf_counter() - self.start
        left = took / max(1, step - self.first) * (self.steps - step) / 60
        means = " ".join(
            f"{k.removeprefix('loss_')} {v / self.count:.3f}" for k, v in self.sums.items()
        )
        print(
            f"step {step}/{self.steps} {means} ({took / 60:.1f} min, {left:.0f} left)", flush=True
        )
        self.sums, self.count = {}, 0


def pretrain(options: argparse.Namespace) -> None:
    """Teach the backbone to name single items among clutter."""
    model = model_of(options)
    swin = model.backbone
    name = nn.Linear(swin.norms[-1].normalized_shape[0], len(NAMES))
    course = Course(nn.ModuleDict({"swin": swin, "name": name}), options)
    stream = scenes(
        items(options.data, "train"), SEEDS["pretrain"], SINGLE, course.first * options.batch
    )
    test = make_scenes(items(options.data, "t10k"), 1000, SEEDS["test"], SINGLE)

    def logits(images: list[Tensor]) -> Tensor:
        prepared = torch.stack(images).float() / 255
        features: Tensor = swin.stage_outputs((prepared - 0.5) / 0.25)[-1]
        answers: Tensor = name(features.mean((2, 3)))
        return answers

    log = Log(course.first, course.steps)
    for step in range(course.first + 1, course.steps + 1):
        made = list(islice(stream, options.batch))
        labels = torch.tensor([int(objects.labels[0]) - 1 for _, objects in made])
        loss = F.cross_entropy(logits([image for image, _ in made]), labels, label_smoothing=0.05)
        course.step(loss)
        log.add({"names": loss})
        if step % 100 == 0 or step == course.steps:
            log.line(step)
        if step % 500 == 0 or step == course.steps:
            course.save()
            with torch.no_grad():
                found = torch.cat(
                    [logits(list(test.images[i : i + 100])) for i in range(0, 1000, 100)]
                )
            right = sum(
                int(o.labels[0]) == a + 1
                for o, a in zip(test.objects, found.argmax(1).tolist(), strict=True)
            )
            print(f"step {step}: {right / 10:.1f} % of 1,000 test items named right", flush=True)


def begin(model: Detector, options: argparse.Namespace) -> None:
    """Start from given weights, or from the backbone that ``pretrain`` has so far."""
    pretrained = options.out / "pretrain.state.pt"
    if options.weights is not None:
        load_state(model, read_weights(options.weights), str(options.weights))
    elif pretrained.exists():
        state = torch.load(pretrained, weights_only=True)
        swin = {k: v for k, v in state["model"].items() if k.startswith("swin.")}
        model.backbone.load_state_dict({k.removeprefix("swin."): v for k, v in swin.items()})
        print(f"backbone of step {state['step']} of pretrain", flush=True)


def batches(
    stream: Iterator[Any], size: int
) -> Iterator[tuple[list[Tensor], list[dict[str, Tensor]]]]:
    """Inputs and targets of a detector, without end."""
    while True:
        made = list(islice(stream, size))
        images = [image.float() / 255 for image, _ in made]
        yield images, [o.target((i.shape[1], i.shape[2])) for i, o in made]


def train(options: argparse.Namespace) -> None:
    """Train the detector, and write its weights in half precision with their score."""
    model = model_of(options)
    begin(model, options)
    course = Course(model, options)
    seen = options.seen + course.first * options.batch
    stream = scenes(items(options.data, "train"), SEEDS["train"], None, seen)
    test = make_scenes(items(options.data, "t10k"), 100, SEEDS["test"])
    log = Log(course.first, course.steps)
    feed = batches(stream, options.batch)
    model.train()
    for step in range(course.first + 1, course.steps + 1):
        losses: dict[str, Tensor] = model(*next(feed))
        course.step(torch.stack(list(losses.values())).sum())
        log.add(losses)
        if step % 50 == 0 or step == course.steps:
            log.line(step)
        if step % 200 == 0 or step == course.steps:
            course.save()
        if step % options.every == 0:
            print(f"step {step}: {said(score(model.eval(), test))}", flush=True)
            model.train()
    write_weights(model.eval(), options)


def score(model: nn.Module, samples: DetectionSamples) -> CocoScores:
    """Average precisions on these scenes."""
    return average_precision(samples, detect(model, samples, batch=20))


def said(scores: CocoScores) -> str:
    """The scores in a line."""
    parts = [
        f"{kind} AP {one.ap or 0:.4f} AP50 {one.ap50 or 0:.4f} AP75 {one.ap75 or 0:.4f}"
        for kind, one in (("box", scores.box), ("mask", scores.mask))
    ]
    return f"{', '.join(parts)} on {scores.images} scenes"


def write_weights(model: Detector, options: argparse.Namespace) -> None:
    """Write float16 weights, and the scores that they have on 500 bundled scenes."""
    halves = {
        key: value.half().contiguous() if value.is_floating_point() else value
        for key, value in model.state_dict().items()
    }
    load_state(model, halves, "the weights in half precision")
    scores = score(model, bundled_scenes("eval", 500))
    name = "scene_swin_cascade" if options.cascade else "scene_swin"
    print(f"{name}, float16 weights: {said(scores)}")
    about = {
        "options": json.dumps(model.options.to_json()),
        "scores": json.dumps(scores.to_json()),
        "steps": str(options.steps),
        "batch": str(options.batch),
    }
    save_file(halves, options.out / f"{name}.safetensors", metadata=about)


def score_file(options: argparse.Namespace) -> None:
    """Print the scores of a file of weights."""
    model = model_of(options)
    load_state(model, read_weights(options.weights), str(options.weights))
    if options.data is None:
        samples = bundled_scenes("eval", options.count, options.seed)
    else:
        test = items(options.data, "t10k")
        other = Items(test.images[BUNDLED:], test.labels[BUNDLED:])
        samples = make_scenes(other, options.count, options.seed)
    scores = score(model.eval(), samples)
    print(said(scores))
    for kind, one in (("box", scores.box), ("mask", scores.mask)):
        print(kind, " ".join(f"{name} {ap or 0:.3f}" for name, ap in one.per_class.items()))


def main() -> None:
    """Read the command line and do one of the jobs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/detector"))
    parser.add_argument("--weights", type=Path, help="to score, or to start from")
    parser.add_argument("--cascade", action="store_true")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--rate", type=float, default=8e-4)
    parser.add_argument("--seen", type=int, default=0, help="scenes that the weights have seen")
    parser.add_argument("--every", type=int, default=500, help="steps between scores")
    parser.add_argument("--split", choices=("calib", "eval"), default="eval", help="of scenes")
    parser.add_argument("--count", type=int, default=500, help="number of scenes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    steps, batch = {"pretrain": (1500, 32)}.get(options.job, (6000, 4))
    options.steps, options.batch = options.steps or steps, options.batch or batch
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    if options.job == "score":
        score_file(options)
    elif options.job == "scenes":
        print(write_coco(bundled_scenes(options.split, options.count, options.seed), options.out))
    elif options.data is None:
        parser.error("training needs --data, the folder of Fashion-MNIST")
    else:
        {"pretrain": pretrain, "train": train}[options.job](options)


if __name__ == "__main__":
    main()
