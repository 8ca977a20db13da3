"""Save and load: one safetensors file with packed codes; plan and format version in its header."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from lampq.artifact.pack import pack, unpack
from lampq.data import Preprocessing
from lampq.detection.source import source_from
from lampq.errors import ConfigError, FormatError, LampqError
from lampq.graph.attention import explicit, explicit_
from lampq.graph.blocks import Sum
from lampq.models import ModelSource, load_state
from lampq.quant.base import CodedQuantizer, Quantizer, describe, rebuild
from lampq.quant.half import is_half
from lampq.quant.modules import (
    LayerFit,
    MatmulFit,
    QuantLayer,
    QuantMatMul,
    QuantSum,
    SumFit,
    quantized_layer,
    replace_module,
)
from lampq.quant.prefix import PrefixQuantizer
from lampq.quant.token import TokenLogQuantizer, TokenQuantizer
from lampq.types import LayerBits, LayerRole, LayerSpec, MatmulSpec, SumSpec
from lampq.version import __version__

# what this lampq reads. 2: numbers in half precision where that is exact, and a digest;
# 3: layers above eight bits, quantized outputs, products and sums, operands in float;
# 4: detectors; 5: ranges per token; 6: first tokens with a width of their own;
# 7: logarithmic ranges per token
FORMAT_VERSION = 7
KEY = "lampq"


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that it is either complete or not there; what was there stays until then."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            mask = os.umask(0)
            os.umask(mask)
            Path(name).chmod(0o666 & ~mask)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise LampqError(f"cannot write {str(path)!r}: {error.strerror or error}") from error


# how whole and half-precision numbers are stored
SHORT = (torch.uint8, torch.float16)


def _stored_quantizer(name: str, quantizer: Quantizer) -> dict[str, Tensor]:
    """Buffers of a quantizer; whole zero points take one byte each."""
    stored = {}
    for key, value in quantizer.state_dict().items():
        small = key.rpartition(".")[2] == "zero" and bool(
            ((value == value.round()) & (value >= 0) & (value < 256)).all()
        )
        stored[f"{name}.{key}"] = value.to(torch.uint8) if small else value
    return stored


def _loaded_quantizer(
    name: str, description: Mapping[str, Any], tensors: dict[str, Tensor]
) -> Quantizer:
    prefix = f"{name}."
    mine = {k: tensors.pop(k) for k in list(tensors) if k.startswith(prefix)}
    buffers = {
        key.removeprefix(prefix): value.float() if value.dtype in SHORT else value
        for key, value in mine.items()
    }
    return rebuild(description, buffers)


def _loaded_decoder(
    name: str, description: Mapping[str, Any], tensors: dict[str, Tensor]
) -> CodedQuantizer:
    """A quantizer of weights."""
    quantizer = _loaded_quantizer(name, description, tensors)
    if not isinstance(quantizer, CodedQuantizer):
        raise FormatError(f"{name!r} is of kind {quantizer.kind!r}, which cannot decode weights")
    return quantizer


def checkpoint_bytes(model: nn.Module, source: ModelSource, notes: Mapping[str, Any]) -> bytes:
    """The whole file of a quantized model; ``notes`` go into its header."""
    tensors: dict[str, Tensor] = {}
    layers: dict[str, Any] = {}
    matmuls: dict[str, Any] = {}
    sums: dict[str, Any] = {}
    state = model.state_dict()
    for name, module in model.named_modules():
        if isinstance(module, QuantLayer):
            _drop(state, name)
            tensors[f"{name}.codes"] = pack(module.codes, module.bits.weight)
            tensors[f"{name}.bias"] = module.bias
            wq, iq = module.weight_quantizer, module.input_quantizer
            output = {"output_quantizer": module.output_quantizer}
            tensors.update(_stored_quantizer(f"{name}.weight_quantizer", wq))
            if iq is not None:
                tensors.update(_stored_quantizer(f"{name}.input_quantizer", iq))
            layers[name] = {
                "role": module.spec.role.value,
                "block": module.spec.block,
                "norm": module.spec.norm,
                "bits": [module.bits.weight, module.bits.activation],
                "shape": list(module.codes.shape),
                "weight_quantizer": describe(wq),
                "input_quantizer": None if iq is None else describe(iq),
                **_described(name, output, tensors),
            }
        elif isinstance(module, QuantMatMul):
            _drop(state, name)
            parts = {"left": module.left, "right": module.right, "output": module.output}
            matmuls[name] = _described(name, parts, tensors)
        elif isinstance(module, QuantSum):
            _drop(state, name)
            sums[name] = _described(name, {"quantizer": module.quantizer}, tensors)
    tensors.update(state)
    contiguous = {
        key: _stored(value.detach().cpu()).clone().contiguous() for key, value in tensors.items()
    }
    header = {
        "format_version": _version(layers, matmuls, sums, detector=source.kind == "detector"),
        "lampq_version": __version__,
        "source": source.to_json(),
        "layers": layers,
        "matmuls": matmuls,
        **({"sums": sums} if sums else {}),
        **notes,
    }
    header["digest"] = digest(header, contiguous)
    return to_bytes(contiguous, metadata={KEY: json.dumps(header, separators=(",", ":"))})


def _described(
    name: str, parts: Mapping[str, Quantizer | None], tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """Descriptions of the quantizers that are there; their tensors are added to the others."""
    there = {key: quantizer for key, quantizer in parts.items() if quantizer is not None}
    for key, quantizer in there.items():
        tensors.update(_stored_quantizer(f"{name}.{key}", quantizer))
    return {key: describe(quantizer) for key, quantizer in there.items()}


def _version(
    layers: Mapping[str, Any],
    matmuls: Mapping[str, Any],
    sums: Mapping[str, Any],
    *,
    detector: bool,
) -> int:
    """The first format version, from 2 on, that has all of this."""
    more = any(max(entry["bits"]) > 8 or "output_quantizer" in entry for entry in layers.values())
    unlike = any(set(entry) != {"left", "right"} for entry in matmuls.values())
    entries = (*layers.values(), *matmuls.values(), *sums.values())
    kinds = set(_kinds(chain.from_iterable(entry.values() for entry in entries)))
    if TokenLogQuantizer.kind in kinds:
        return 7
    if PrefixQuantizer.kind in kinds:
        return 6
    if TokenQuantizer.kind in kinds:
        return 5
    return 4 if detector else 3 if more or unlike or sums else 2


def _kinds(parts: Iterable[Any]) -> Iterator[str]:
    """The kinds of the quantizers among these, and of those inside them."""
    for part in parts:
        if isinstance(part, dict):
            yield part["kind"]
            yield from _kinds(part.values())


def _stored(values: Tensor) -> Tensor:
    return values.half() if values.dim() and is_half(values) else values


def digest(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """What tells whether a header or a tensor has been changed."""
    found = hashlib.sha256()
    content = {key: value for key, value in header.items() if key != "digest"}
    found.update(json.dumps(content, sort_keys=True).encode())
    for key in sorted(tensors):
        values = tensors[key]
        found.update(f"{key} {values.dtype} {tuple(values.shape)}".encode())
        found.update(values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _drop(state: dict[str, Any], name: str) -> None:
    for key in [key for key in state if key.startswith(f"{name}.")]:
        del state[key]


@dataclass(frozen=True, slots=True)
class Header:
    """What the header of a checkpoint says."""

    content: Mapping[str, Any]

    @property
    def source(self) -> ModelSource:
        """How to build the architecture."""
        return source_from(self.content["source"])

    @property
    def preprocessing(self) -> Preprocessing | None:
        """How pictures are prepared for this model, if the run knew."""
        fields = self.content.get("preprocessing")
        if fields is None:
            return None
        return Preprocessing(
            tuple(fields["mean"]),
            tuple(fields["std"]),
            fields["crop_pct"],
            fields["size"],
            fields.get("recrop", True),  # files of before there was a choice
        )

    def layers(self) -> Iterable[tuple[LayerSpec, LayerBits]]:
        """The quantized layers and their widths, in execution order."""
        for name, entry in self.content["layers"].items():
            rows, columns = entry["shape"]
            role = LayerRole(entry["role"])
            spec = LayerSpec(name, role, entry["block"], rows * columns, entry["norm"])
            yield spec, LayerBits(*entry["bits"])


def read_checkpoint(path: Path) -> tuple[Header, dict[str, Tensor]]:
    """Header and tensors of a checkpoint, with its version and its digest checked."""
    header = read_header(path)
    try:
        with safe_open(path, framework="pt") as opened:
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise FormatError(f"{str(path)!r} is damaged or no safetensors file: {error}") from error
    content = header.content
    if content["format_version"] > 1 and content.get("digest") != digest(content, tensors):
        raise FormatError(f"{str(path)!r} was changed after lampq wrote it, or is damaged")
    return header, tensors


def read_header(path: Path) -> Header:
    """The header of a checkpoint, with its version checked; no tensor is read."""
    if not path.is_file():
        raise FormatError(f"no checkpoint {str(path)!r}")
    try:
        with safe_open(path, framework="pt") as opened:
            metadata = opened.metadata() or {}
    except (SafetensorError, OSError, ValueError) as error:
        raise FormatError(f"{str(path)!r} is damaged or no safetensors file: {error}") from error
    if KEY not in metadata:
        raise FormatError(
            f"{str(path)!r} is a safetensors file, but no lampq checkpoint; "
            "float weights go with --weights"
        )
    try:
        content = json.loads(metadata[KEY])
        version = content["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"the header of {str(path)!r} cannot be read: {error}") from error
    if type(version) is not int or version < 1:
        raise FormatError(f"{str(path)!r} has format version {version!r}, which does not exist")
    if version > FORMAT_VERSION:
        raise FormatError(
            f"{str(path)!r} has format version {version}, this lampq reads up to "
            f"{FORMAT_VERSION}: install a newer lampq"
        )
    header = Header(content)
    try:
        named = isinstance(header.source.name, str) and isinstance(content["matmuls"], dict)
        if not named or not list(header.layers()):
            raise FormatError(f"the header of {str(path)!r} names no model or no layers")
    except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
        raise FormatError(f"the header of {str(path)!r} cannot be read: {error!r}") from error
    return header


def load_checkpoint(path: Path, model: nn.Module | None = None) -> nn.Module:
    """The quantized model of a checkpoint; ``model`` is needed for architectures of one's own."""
    header, tensors = read_checkpoint(path)
    float_model = explicit_(header.source.build()) if model is None else explicit(model)
    try:
        for spec, bits in header.layers():
            entry = header.content["layers"][spec.name]
            original = float_model.get_submodule(spec.name)
            fit = _loaded_fit(spec, bits, entry, tensors)
            replace_module(float_model, spec.name, quantized_layer(fit, original))
        for name, entry in header.content["matmuls"].items():
            site = MatmulSpec(name, "av" if name.endswith("av") else "qk", -1)
            parts = [_loaded_part(name, key, entry, tensors) for key in ("left", "right", "output")]
            replace_module(float_model, name, QuantMatMul(MatmulFit(site, *parts)))
        for name, entry in header.content.get("sums", {}).items():
            original = float_model.get_submodule(name)
            assert isinstance(original, Sum), "only sums are stored as sums"
            quantizer = _loaded_quantizer(f"{name}.quantizer", entry["quantizer"], tensors)
            total = SumFit(SumSpec(name, original.role, -1), quantizer)
            replace_module(float_model, name, QuantSum(total))
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise FormatError(
            f"{str(path)!r} does not fit the model {header.source.name!r}: {error}"
        ) from error
    quantized = {
        key
        for name, module in float_model.named_modules()
        if isinstance(module, QuantLayer | QuantMatMul | QuantSum)
        for key in (f"{name}.{inner}" for inner in module.state_dict())
    }
    state = {k: v for k, v in float_model.state_dict().items() if k in quantized}
    load_state(float_model, {**state, **tensors}, str(path))
    for parameter in float_model.parameters():
        parameter.requires_grad = False
    return float_model.eval()


def _loaded_fit(
    spec: LayerSpec, bits: LayerBits, entry: Mapping[str, Any], tensors: dict[str, Tensor]
) -> LayerFit:
    codes = unpack(tensors.pop(f"{spec.name}.codes"), bits.weight, tuple(entry["shape"]))
    bias = tensors.pop(f"{spec.name}.bias").float()
    if bias.shape != (entry["shape"][0],):
        raise FormatError(f"the bias of {spec.name!r} has shape {tuple(bias.shape)}")
    return LayerFit(
        spec=spec,
        bits=bits,
        codes=codes,
        bias=bias,
        weight_quantizer=_loaded_decoder(
            f"{spec.name}.weight_quantizer", entry["weight_quantizer"], tensors
        ),
        input_quantizer=_loaded_part(spec.name, "input_quantizer", entry, tensors),
        output_quantizer=_loaded_part(spec.name, "output_quantizer", entry, tensors),
    )


def _loaded_part(
    name: str, key: str, entry: Mapping[str, Any], tensors: dict[str, Tensor]
) -> Quantizer | None:
    """A quantizer that an entry may have."""
    found = entry.get(key)
    return None if found is None else _loaded_quantizer(f"{name}.{key}", found, tensors)
