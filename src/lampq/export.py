"""A packed checkpoint as a verified ONNX file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from lampq.artifact.checkpoint import Header, load_checkpoint, read_checkpoint, write_atomically
from lampq.artifact.onnx import onnx_model
from lampq.artifact.onnx.file import onnx_bytes
from lampq.artifact.onnx.sites import runs_in_integers
from lampq.data import Samples
from lampq.errors import ConfigError, ExportError
from lampq.evaluate import predict
from lampq.progress import Progress
from lampq.quant.modules import QuantLayer
from lampq.runtime import check_runtime, installed
from lampq.types import Profile
from lampq.verify import Verification, verify
from lampq.version import __version__

# images on which whole models are compared, if no other number is asked for
IMAGES = 256


@dataclass(frozen=True, slots=True)
class Export:
    """What was written, and what was found of it in each runtime."""

    path: Path
    size: int
    profile: Profile
    verified: tuple[Verification, ...]

    def to_json(self) -> dict[str, Any]:
        """The fields, ready for a file."""
        return {
            "file": str(self.path),
            "bytes": self.size,
            "profile": self.profile,
            "verified": [one.to_json() for one in self.verified],
        }


def profile_of(header: Header) -> Profile:
    """What a checkpoint was quantized for."""
    config = header.content.get("config")
    found = config.get("profile", "accuracy") if isinstance(config, dict) else "accuracy"
    return "speed" if found == "speed" else "accuracy"


def check_runtimes(names: Sequence[str]) -> tuple[str, ...]:
    """The runtimes to verify in: those named, or all that are installed."""
    found = tuple(names) or installed()
    for name in found:
        check_runtime(name)
    if not found or "torch" in found:
        raise ConfigError(
            "an export is verified in onnxruntime or openvino, and needs at least one of them: "
            "pip install 'lampq[onnx]' 'lampq[openvino]'"
        )
    return found


def export_onnx(
    checkpoint: str | Path,
    out: str | Path,
    samples: Samples,
    *,
    model: nn.Module | None = None,
    runtimes: Sequence[str] = (),
    any_cpu: bool = True,
    progress: Progress | None = None,
) -> Export:
    """Write a checkpoint as ONNX once it is verified on the samples, or nothing at all.

    ``model`` is the float architecture, needed only for classes that timm does not know.
    ``any_cpu``: right also on x86 processors without 8-bit dot products, where products of
    eight-bit weights and inputs would overflow.
    """
    names = check_runtimes(runtimes)
    header, _ = read_checkpoint(Path(checkpoint))
    quantized = load_checkpoint(Path(checkpoint), model)
    profile = profile_of(header)
    if profile == "speed":
        _check_speed(quantized)
    about = {
        "lampq_version": __version__,
        "source": header.source.to_json(),
        "profile": profile,
        "plan": header.content.get("plan"),
        "preprocessing": None if header.preprocessing is None else asdict(header.preprocessing),
        "any_cpu": any_cpu,
    }
    content = onnx_bytes(onnx_model(quantized, any_cpu=any_cpu), about)
    expected = predict(quantized, samples)
    verified = tuple(
        verify(quantized, content, name, samples, expected, any_cpu=any_cpu, progress=progress)
        for name in names
    )
    write_atomically(Path(out), content)
    return Export(Path(out), len(content), profile, verified)


def _check_speed(model: nn.Module) -> None:
    """Raise if a layer with a quantized input would run in float."""
    for name, layer in model.named_modules():
        quantized = isinstance(layer, QuantLayer) and layer.input_quantizer is not None
        if quantized and not runs_in_integers(layer):
            raise ExportError(
                f"layer {name!r} was to be quantized for speed, but its input is not on one "
                "uniform grid of at most eight bits: the method has no such form"
            )
