"""Accuracy, size and speed of deployed models: one JSON line per row, resumable.

python benchmarks/deploy.py --results runs/deploy.jsonl [--only speed] [--threads 2]
python benchmarks/deploy.py --results runs/deploy.jsonl --table

The real ViT-Tiny at mean widths of 4 and 3 bits in both profiles: top-1 in torch, ONNX Runtime and
OpenVINO, the verification of the export, file size, speed; and the speed of a DeiT-S of random
weights. On one thread speed is CPU time, so that a busy machine does not show; on two it is wall
time. ``--images`` and ``--method`` make it small enough to try out, ``--reconstruct`` takes models
that are reconstructed after their plan; each with another ``--results``.
Packed files, finished fits and measures are in a folder beside the results, and are not made again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import real
import timm
import torch
from rows import Row, command_line, compute, read

from lampq import bench
from lampq.artifact.checkpoint import load_checkpoint, write_atomically
from lampq.artifact.fits import FitFolder
from lampq.artifact.states import StateFolder
from lampq.config import make_config
from lampq.data import Samples
from lampq.errors import ExportError
from lampq.evaluate import predict, top1
from lampq.export import export_onnx
from lampq.graph.attention import explicit
from lampq.graph.discover import discover
from lampq.models import LoadedModel
from lampq.pipeline import packed, quantize
from lampq.progress import Journal, Progress
from lampq.runtime import SESSIONS, load
from lampq.scoring import Run
from lampq.types import BitPlan, LayerBits

BITS, PROFILES = (4, 3), ("accuracy", "speed")
VERIFIED = 256
# a plan of mean width 3.96 that has every width from 2 to 6, as qkv, proj, fc1, fc2 of a block
MIXED = ((4, 2, 4, 4), (3, 5, 4, 4), (5, 3, 3, 4), (4, 6, 4, 4))


class Bench:
    """Model and images, loaded once; packed files are made when they are first needed."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.work: Path = options.results.with_suffix(".work")
        self.method: str = options.method
        self.reconstruct: str | None = options.reconstruct
        self.rounds: int = options.rounds
        self.loaded: LoadedModel = real.model()
        self.calibration: Samples = real.calibration()
        self.evaluation: Samples = real.evaluation()
        if options.images:
            self.calibration = self.calibration.subset(options.images, 0)
            self.evaluation = self.evaluation.subset(options.images, 0)
        self._logits: dict[Path, torch.Tensor] = {}

    def file(self, bits: int, profile: str) -> Path:
        """The packed model of a mean width and a profile."""
        path = self.work / f"{bits} {profile}.safetensors"
        if not path.is_file():
            config = make_config(
                {
                    "bits": bits,
                    "profile": profile,
                    "method": self.method,
                    "reconstruct": self.reconstruct,
                }
            )
            folder = self.work / f"{self.method} {profile}"
            folder.mkdir(parents=True, exist_ok=True)
            run = Run(
                Progress(),
                Journal(folder / "journal.jsonl"),
                FitFolder(folder / "fits"),
                states=StateFolder(folder / f"states {self.reconstruct} {bits}"),
            )
            result = quantize(self.loaded.model, self.calibration, config=config, run=run)
            content = packed(result.model, result.source, result.plan, config, real.HOW)
            write_atomically(path, content)
        return path

    def logits(self, path: Path) -> torch.Tensor:
        """The torch model's logits on the evaluation images."""
        if path not in self._logits:
            self._logits[path] = predict(load_checkpoint(path), self.evaluation)
        return self._logits[path]


def in_torch(work: Bench, bits: int, profile: str) -> Row:
    """Accuracy of the packed model in torch, and the size of its file."""
    path = work.file(bits, profile)
    labels = work.evaluation.require_labels("an accuracy")
    size = path.stat().st_size
    parameters = sum(p.numel() for p in work.loaded.model.parameters())
    return {
        "top1": top1(work.logits(path), labels),
        "images": len(labels),
        "bytes": size,
        "smaller": 4 * parameters / size,
    }


def in_runtime(work: Bench, bits: int, profile: str, runtime: str) -> Row:
    """Accuracy of the deployed form, and how often it gives the answer of torch."""
    path = work.file(bits, profile)
    session = load(path, runtime)
    logits = torch.cat([session(images) for images, _ in work.evaluation.batches(25)])
    labels = work.evaluation.require_labels("an accuracy")
    same = logits.argmax(1) == work.logits(path).argmax(1)
    return {
        "top1": top1(logits, labels),
        "agree": 100 * float(same.double().mean()),
        "images": len(labels),
    }


def verified(work: Bench, bits: int, profile: str) -> Row:
    """The export to ONNX: errors of layers, answers and integer kernels in each runtime."""
    path = work.file(bits, profile)
    samples = work.calibration.subset(VERIFIED, 0)
    try:
        return export_onnx(path, path.with_suffix(".onnx"), samples).to_json()
    except ExportError as error:
        return {"failed": str(error)}


def timed(path: Path, work: Bench, threads: int) -> Row:
    """The benchmark of a packed model."""
    clock = "cpu" if threads == 1 else "wall"
    how = bench.settings(threads=(threads,), rounds=work.rounds, clock=clock)
    return bench.bench(path, how)


def timed_file(work: Bench, bits: int, profile: str, threads: int) -> Row:
    """The benchmark of the real model."""
    return timed(work.file(bits, profile), work, threads)


def timed_random(work: Bench, name: str) -> Row:
    """The benchmark of a model of random weights, at the widths of MIXED."""
    path = work.work / f"random {name}.safetensors"
    if not path.is_file():
        torch.manual_seed(0)
        model = timm.create_model(name, pretrained=False).eval()
        layers = discover(explicit(model)).allocatable
        widths = tuple(LayerBits(*[MIXED[i // 4 % 4][i % 4]] * 2) for i in range(len(layers)))
        samples = Samples(torch.randn(4, 3, 224, 224), torch.zeros(4, dtype=torch.long))
        plan = dict(BitPlan(layers, widths))
        few: dict[str, Any] = {"fit_images": 4, "score_images": 4, "method": "minmax"}
        result = quantize(model, samples, plan=plan, profile="speed", **few)
        path.parent.mkdir(parents=True, exist_ok=True)
        result.save(path)
    return timed(path, work, 1)


def jobs(work: Bench) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Every row, most wanted first."""
    for profile in reversed(PROFILES):
        for bits in BITS:
            about = f"{bits}MP {profile}"
            yield f"{about} torch", partial(in_torch, work, bits, profile)
            for runtime in SESSIONS:
                yield f"{about} {runtime}", partial(in_runtime, work, bits, profile, runtime)
            yield f"{about} export", partial(verified, work, bits, profile)
            for threads in (1, 2):
                yield (
                    f"{about} bench {threads}",
                    partial(timed_file, work, bits, profile, threads),
                )
    yield "random deit_small bench 1", partial(timed_random, work, "deit_small_patch16_224")


def say(row: Row) -> str:
    """One row in short."""
    if "remarks" in row:
        return " ".join(row["remarks"])
    if "failed" in row:
        return str(row["failed"])
    if "verified" in row:
        found = (f"{v['runtime']} {v['error']:.1e} {v['agreement']:.2f}" for v in row["verified"])
        return ", ".join(found)
    return ", ".join(f"{k} {row[k]:.2f}" for k in ("top1", "agree", "smaller") if k in row)


def table(rows: list[Row]) -> str:
    """Accuracy and size, verification, and speed, as Markdown tables."""
    by_key = {row["key"]: row for row in rows}
    lines = [
        "| | top-1 torch | onnxruntime | openvino | agree (ort, ov) | MB | smaller |",
        "|---|---|---|---|---|---|---|",
    ]
    for bits in BITS:
        for profile in PROFILES:
            about = f"{bits}MP {profile}"
            own = by_key.get(f"{about} torch")
            if own is None:
                continue
            others = [by_key.get(f"{about} {runtime}", {}) for runtime in SESSIONS]
            scores = " | ".join(_or_blank(other.get("top1")) for other in others)
            agree = ", ".join(_or_blank(other.get("agree")) for other in others)
            lines.append(
                f"| {about} | {own['top1']:.2f} | {scores} | {agree} "
                f"| {own['bytes'] / 1e6:.3f} | {own['smaller']:.2f} |"
            )
    lines += [
        "",
        "| | runtime | largest layer error | same answers [%] | of torch itself [%] "
        "| integer layers | float layers |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "failed" in row:
            lines.append(f"| {row['key']} | {row['failed']} | | | | | |")
        for one in row.get("verified", ()):
            lines.append(
                f"| {row['key']} | {one['runtime']} {one['version']} | {one['error']:.1e} "
                f"| {one['agreement']:.2f} | {_or_blank(one['own_agreement'])} "
                f"| {one['integer']} | {len(one['floating'])} |"
            )
    lines += [
        "",
        "| | batch | runtime | form | ms | x torch | x same runtime |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        for one in row.get("rows", ()):
            ratios = " | ".join(
                f"{r['median']:.2f} ({r['low']:.2f} to {r['high']:.2f})"
                for r in (one["against_torch"], one["against_runtime"])
            )
            lines.append(
                f"| {row['key']} | {one['batch']} | {one['runtime']} | {one['kind']} "
                f"| {one['milliseconds']:.3g} | {ratios} |"
            )
    lines += ["", "| | processor | load [s] |", "|---|---|---|"]
    for row in rows:
        if "load_seconds" in row:
            loading = ", ".join(f"{k} {v:.2f}" for k, v in row["load_seconds"].items())
            lines.append(f"| {row['key']} | {row['processor']}, {row['clock']} | {loading} |")
    return "\n".join(lines)


def _or_blank(number: float | None) -> str:
    return "" if number is None else f"{number:.2f}"


def main() -> None:
    """Compute the rows that the results file does not have yet, or print them."""
    parser = command_line(__doc__, Path("runs/deploy.jsonl"))
    parser.add_argument("--images", type=int, help="only so many images of each set")
    parser.add_argument("--method", default="adalog", help="base method")
    parser.add_argument("--reconstruct", help="finisher of the plans, such as align")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each benchmark")
    options = parser.parse_args()
    if options.table:
        print(table(sorted(read(options.results), key=lambda row: str(row["key"]))))
        return
    compute(options, lambda: jobs(Bench(options)), say)


if __name__ == "__main__":
    main()
