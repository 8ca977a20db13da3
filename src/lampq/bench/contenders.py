"""What a packed model is timed against: torch, and the same runtime in fp32, bf16 and its own int8.

Times do not depend on the values of the weights: the float models have random ones.
"""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lampq.artifact.onnx import onnx_model
from lampq.errors import MissingDependencyError
from lampq.graph.attention import explicit
from lampq.runtime import SESSIONS, open_model
from lampq.runtime.base import Session
from lampq.runtime.ov import OpenVinoSession

KINDS = ("fp32", "bf16", "int8", "lampq")
NNCF_IMAGES = 8
# bf16 may be advertised and still end the process: it is tried in another one
BF16_PROBE = """
import torch
with torch.no_grad():
    assert torch.ops.mkldnn._is_mkldnn_bf16_supported()
    torch.nn.functional.linear(torch.ones(32, 64).bfloat16(), torch.ones(64, 64).bfloat16())
"""


@dataclass(frozen=True, slots=True)
class Contender:
    """One form of the model in one runtime."""

    runtime: str
    kind: str
    run: Callable[[Tensor], Tensor]

    @property
    def name(self) -> str:
        """Runtime and form."""
        return f"{self.runtime} {self.kind}"


@contextmanager
def _silent() -> Iterator[None]:
    """No messages and progress bars of other people's tools."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def has_bf16() -> bool:
    """Whether this processor computes in bf16 by itself."""
    probe = subprocess.run(
        [sys.executable, "-c", BF16_PROBE], capture_output=True, check=False, timeout=120
    )
    return probe.returncode == 0


class Contest:
    """All contenders of one model; graphs are made once and opened for every number of threads.

    ``plain`` is the float model. ``missing`` says which contenders are not there, and why.
    """

    def __init__(
        self,
        quantized: nn.Module,
        plain: nn.Module,
        size: tuple[int, ...],
        runtimes: tuple[str, ...],
    ) -> None:
        self.quantized, self.size, self.runtimes = quantized, size, runtimes
        self.plain = plain.eval().requires_grad_(False)
        self.missing: list[str] = []
        self._float = onnx_model(explicit(self.plain)).SerializeToString()
        self._bf16 = has_bf16()
        if not self._bf16:
            self.missing.append("this processor does not compute in bf16, so there is no bf16 row")
        self._own = {name: self._own_int8(name) for name in self.runtimes}

    def _own_int8(self, runtime: str) -> Any:
        """The runtime's own 8-bit form of the float model, or None if its tool is not there."""
        try:
            with _silent():
                return OWN_INT8[runtime](self._float, self.size)
        except MissingDependencyError as error:
            self.missing.append(str(error))
            return None

    def contenders(self, threads: int) -> list[Contender]:
        """Everything at that number of threads; torch's is a setting of the process."""
        torch.set_num_threads(threads)
        found = [Contender("torch", "fp32", self.plain)]
        if self._bf16:
            half = explicit(self.plain).bfloat16()
            found.append(Contender("torch", "bf16", lambda x: half(x.bfloat16())))
        for runtime in self.runtimes:
            opened: dict[str, Session | None] = {
                "fp32": SESSIONS[runtime](self._float, threads=threads),
                "bf16": self._in_bf16(runtime, threads),
                "int8": self._opened_own(runtime, threads),
                "lampq": open_model(self.quantized, runtime, threads=threads),
            }
            found += [Contender(runtime, kind, s) for kind, s in opened.items() if s is not None]
        return found

    def _in_bf16(self, runtime: str, threads: int) -> Session | None:
        if not self._bf16 or runtime != "openvino":
            return None
        return OpenVinoSession(self._float, threads=threads, precision="bf16")

    def _opened_own(self, runtime: str, threads: int) -> Session | None:
        own = self._own[runtime]
        return None if own is None else SESSIONS[runtime](own, threads=threads)


def _dynamic_int8(model: bytes, _size: tuple[int, ...]) -> bytes:
    """ONNX Runtime's dynamic quantization, which its documentation advises for transformers."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder) / "float.onnx", Path(folder) / "int8.onnx"
        before.write_bytes(model)
        quantize_dynamic(
            before,
            after,
            op_types_to_quantize=["MatMul"],
            per_channel=True,
            weight_type=QuantType.QInt8,
        )
        return after.read_bytes()


def _nncf_int8(model: bytes, size: tuple[int, ...]) -> Any:
    """OpenVINO's post-training quantization by NNCF."""
    try:
        import nncf
    except ImportError:
        raise MissingDependencyError(
            "openvino's own 8-bit form is made by NNCF, which is not installed: "
            "pip install 'lampq[bench]'"
        ) from None
    import openvino

    generator = torch.Generator().manual_seed(0)
    images = [torch.randn(1, *size, generator=generator).numpy() for _ in range(NNCF_IMAGES)]
    return nncf.quantize(
        openvino.Core().read_model(model),
        nncf.Dataset(images),
        model_type=nncf.ModelType.TRANSFORMER,
        subset_size=NNCF_IMAGES,
    )


OWN_INT8: dict[str, Callable[[bytes, tuple[int, ...]], Any]] = {
    "onnxruntime": _dynamic_int8,
    "openvino": _nncf_int8,
}
