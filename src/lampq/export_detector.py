"""The backbone and pyramid of a packed detector as a verified ONNX file, for images of one size."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lampq.artifact.checkpoint import load_checkpoint, read_checkpoint, write_atomically
from lampq.artifact.onnx import INPUT, onnx_pyramid
from lampq.artifact.onnx.file import onnx_bytes
from lampq.data import Samples
from lampq.errors import ConfigError, ExportError
from lampq.export import check_runtimes
from lampq.pieces import level_names
from lampq.progress import Progress
from lampq.runtime import SESSIONS
from lampq.runtime.base import Session
from lampq.verify import PartsVerification, verify_parts
from lampq.version import __version__

if TYPE_CHECKING:
    from lampq.detection.models import Detector
    from lampq.detection.samples import DetectionSamples

# pictures on which whole pyramids are compared, if no other number is asked for
IMAGES = 8
# differences of whole pyramids that are never too large, in deviations of a level
TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class PyramidVerification(PartsVerification):
    """What was found of a pyramid.

    ``difference`` is the mean difference of the levels from torch in deviations of a level, the
    largest of all levels; ``own_difference`` is that of torch in double precision.
    """

    difference: float
    own_difference: float


@dataclass(frozen=True, slots=True)
class PyramidExport:
    """What was written, for which height and width, and what was found of it in each runtime."""

    path: Path
    bytes: int
    size: tuple[int, int]
    verified: tuple[PyramidVerification, ...]

    def to_json(self) -> dict[str, Any]:
        """The fields, ready for a file."""
        return {
            "file": str(self.path),
            "bytes": self.bytes,
            "size": list(self.size),
            "verified": [one.to_json() for one in self.verified],
        }


@torch.no_grad()
def pyramid_inputs(
    model: Detector, samples: DetectionSamples, size: tuple[int, int] | None = None
) -> Tensor:
    """Pictures as the backbone takes them, (n, channels, height, width).

    Each is resized and normalised as the detector does it, then padded with zeros or cut to the
    size, which is by default that of the first.
    """
    found: list[Tensor] = []
    for place in range(len(samples)):
        (image,) = model.transform(samples.inputs(slice(place, place + 1)))[0].tensors
        height, width = size or image.shape[1:]
        size = (int(height), int(width))
        image = image[:, :height, :width]
        found.append(F.pad(image, (0, width - image.shape[2], 0, height - image.shape[1])))
    return torch.stack(found)


def export_pyramid(
    checkpoint: str | Path,
    out: str | Path,
    samples: DetectionSamples,
    *,
    size: tuple[int, int] | None = None,
    runtimes: Sequence[str] = (),
    any_cpu: bool = True,
    progress: Progress | None = None,
) -> PyramidExport:
    """Write the backbone and pyramid of a packed detector once they are verified, or nothing.

    Args:
        checkpoint: The file of ``Result.save``, or of a run.
        out: The ONNX file to write. It takes normalised images of one size and gives the levels
            ``level_0``, ``level_1``, ... and ``level_pool``; the number of images is free.
        samples: Pictures on which it is verified.
        size: Height and width of the images, multiples of 4; by default those of the first
            picture as the detector resizes it.
        runtimes: Where to verify; all that are installed by default.
        any_cpu: Right also on x86 processors without 8-bit dot products.
        progress: Where to say how far it is.
    """
    names = check_runtimes(runtimes)
    header, _ = read_checkpoint(Path(checkpoint))
    if header.source.kind != "detector":
        raise ConfigError(f"{str(checkpoint)!r} holds no detector: use export_onnx")
    model: Any = load_checkpoint(Path(checkpoint))
    images = pyramid_inputs(model, samples, size)
    fixed = (int(images.shape[2]), int(images.shape[3]))
    about = {
        "lampq_version": __version__,
        "source": header.source.to_json(),
        "part": "backbone and pyramid",
        "size": list(fixed),
        "plan": header.content.get("plan"),
        "preprocessing": None,
        "any_cpu": any_cpu,
    }
    content = onnx_bytes(onnx_pyramid(model.backbone, fixed, any_cpu=any_cpu), about)
    shown = Samples(images)
    verified = tuple(
        _verified(model.backbone, content, name, shown, any_cpu, progress or Progress())
        for name in names
    )
    write_atomically(Path(out), content)
    return PyramidExport(Path(out), len(content), fixed, verified)


@torch.no_grad()
def _verified(
    model: nn.Module,
    content: bytes,
    runtime: str,
    samples: Samples,
    any_cpu: bool,
    progress: Progress,
) -> PyramidVerification:
    session: Session = SESSIONS[runtime](content)
    parts = verify_parts(model, content, session, samples, any_cpu=any_cpu)
    double = copy.deepcopy(model).double()
    worst = {"runtime": 0.0, "torch": 0.0}
    tracked = progress.track(samples.batches(1), f"comparing in {runtime}", len(samples))
    for images, _ in tracked:
        exact = level_names(model(images))
        others = {
            "runtime": {
                k: torch.from_numpy(v) for k, v in session.run({INPUT: images.numpy()}).items()
            },
            "torch": level_names(double(images.double())),
        }
        for who, levels in others.items():
            for name, level in exact.items():
                spread = level.std().clamp_min(1e-12)
                found = float((levels[name] - level).abs().mean() / spread)
                worst[who] = max(worst[who], found if found == found else float("inf"))
    # codes that flip make up the difference, in torch as in a runtime
    allowed = max(TOLERANCE, 3 * worst["torch"])
    if worst["runtime"] > allowed:
        raise ExportError(
            f"{runtime} differs from torch by {worst['runtime']:.2g} deviations of a level, more "
            f"than {allowed:.2g}; torch in double precision differs by {worst['torch']:.2g}"
        )
    return PyramidVerification(
        *astuple(parts), difference=worst["runtime"], own_difference=worst["torch"]
    )
