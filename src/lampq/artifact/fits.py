"""Fits kept on disk, so that an interrupted run does not compute them again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from lampq.artifact.checkpoint import (
    _loaded_decoder,
    _loaded_quantizer,
    _stored_quantizer,
    write_atomically,
)
from lampq.quant.base import describe
from lampq.quant.fold import NormFold
from lampq.quant.modules import LayerFit
from lampq.types import LayerBits, LayerSpec


class FitFolder:
    """A FitStore of one file per layer and width."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, spec: LayerSpec, bits: LayerBits) -> Path:
        name = hashlib.sha256(f"{spec.name} {bits}".encode()).hexdigest()[:24]
        return self.folder / f"{name}.fit"

    def save(self, fit: LayerFit) -> None:
        """Store a fit."""
        tensors: dict[str, Tensor] = {"codes": fit.codes.contiguous(), "bias": fit.bias}
        tensors.update(_stored_quantizer("weight_quantizer", fit.weight_quantizer))
        about = {"weight_quantizer": describe(fit.weight_quantizer)}
        optional = {
            "input_quantizer": fit.input_quantizer,
            "output_quantizer": fit.output_quantizer,
        }
        for name, quantizer in optional.items():
            if quantizer is not None:
                tensors.update(_stored_quantizer(name, quantizer))
                about[name] = describe(quantizer)
        if fit.fold is not None:
            tensors["ratio"], tensors["shift"] = fit.fold.ratio, fit.fold.shift
        content = {key: value.contiguous().clone() for key, value in tensors.items()}
        write_atomically(
            self._path(fit.spec, fit.bits), to_bytes(content, {"fit": json.dumps(about)})
        )

    def load(self, spec: LayerSpec, bits: LayerBits) -> LayerFit | None:
        """The stored fit, if there is a readable one."""
        path = self._path(spec, bits)
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt") as opened:
                about = json.loads((opened.metadata() or {})["fit"])
                tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        except (SafetensorError, KeyError, ValueError, OSError):
            return None
        decoder = _loaded_decoder("weight_quantizer", about.pop("weight_quantizer"), tensors)
        there = {name: description for name, description in about.items() if description}
        quantizers = {name: _loaded_quantizer(name, there[name], tensors) for name in there}
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
