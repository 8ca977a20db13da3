"""Fits kept on disk, so that an interrupted run does not compute them again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from lampq.artifact.checkpoint import _loaded_quantizer, _stored_quantizer, write_atomically
from lampq.quant.base import CodedQuantizer, Quantizer, describe
from lampq.quant.fold import NormFold
from lampq.quant.modules import LayerFit, MatmulFit, SiteFit, SumFit
from lampq.types import LayerBits, LayerSpec, MatmulSpec, SumSpec


class FitFolder:
    """A FitStore of one file per site and width."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, name: str, widths: object) -> Path:
        hashed = hashlib.sha256(f"{name} {widths}".encode()).hexdigest()[:24]
        return self.folder / f"{hashed}.fit"

    def _write(
        self,
        path: Path,
        tensors: Mapping[str, Tensor],
        quantizers: Mapping[str, Quantizer | None],
    ) -> None:
        content = dict(tensors)
        about = {}
        for name, quantizer in quantizers.items():
            if quantizer is not None:
                content.update(_stored_quantizer(name, quantizer))
                about[name] = describe(quantizer)
        own = {key: value.contiguous().clone() for key, value in content.items()}
        write_atomically(path, to_bytes(own, {"fit": json.dumps(about)}))

    def _read(self, path: Path) -> tuple[dict[str, Tensor], dict[str, Quantizer]] | None:
        """Tensors and quantizers of a file, if there is a readable one."""
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt") as opened:
                about = json.loads((opened.metadata() or {})["fit"])
                tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        except (SafetensorError, KeyError, ValueError, OSError):
            return None
        there = {name: description for name, description in about.items() if description}
        quantizers = {name: _loaded_quantizer(name, there[name], tensors) for name in there}
        return tensors, quantizers

    def save(self, fit: LayerFit) -> None:
        """Store a fit."""
        tensors = {"codes": fit.codes, "bias": fit.bias}
        if fit.fold is not None:
            tensors |= {"ratio": fit.fold.ratio, "shift": fit.fold.shift}
        quantizers = {
            "weight_quantizer": fit.weight_quantizer,
            "input_quantizer": fit.input_quantizer,
            "output_quantizer": fit.output_quantizer,
        }
        self._write(self._path(fit.spec.name, fit.bits), tensors, quantizers)

    def load(self, spec: LayerSpec, bits: LayerBits) -> LayerFit | None:
        """The stored fit, if there is a readable one."""
        found = self._read(self._path(spec.name, bits))
        if found is None:
            return None
        tensors, quantizers = found
        decoder = quantizers.get("weight_quantizer")
        if not isinstance(decoder, CodedQuantizer):
            return None
        fold = NormFold(tensors["ratio"], tensors["shift"]) if "ratio" in tensors else None
        return LayerFit(
            spec=spec,
            bits=bits,
            codes=tensors["codes"],
            bias=tensors["bias"],
            weight_quantizer=decoder,
            input_quantizer=quantizers.get("input_quantizer"),
            fold=fold,
            output_quantizer=quantizers.get("output_quantizer"),
        )

    def save_site(self, fit: SiteFit, widths: tuple[int, ...]) -> None:
        """Store the fit of an attention product or a sum."""
        if isinstance(fit, SumFit):
            quantizers: dict[str, Quantizer | None] = {"quantizer": fit.quantizer}
        else:
            quantizers = {"left": fit.left, "right": fit.right, "output": fit.output}
        self._write(self._path(fit.spec.name, widths), {}, quantizers)

    def load_site(self, spec: MatmulSpec | SumSpec, widths: tuple[int, ...]) -> SiteFit | None:
        """The stored fit of an attention product or a sum, if there is a readable one."""
        found = self._read(self._path(spec.name, widths))
        if found is None:
            return None
        _, quantizers = found
        if isinstance(spec, SumSpec):
            return SumFit(spec, quantizers["quantizer"])
        return MatmulFit(
            spec, quantizers.get("left"), quantizers.get("right"), quantizers.get("output")
        )
