"""Models by name: timm's, a local state dict, the bundled ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lampq.data import Preprocessing, Samples
from lampq.errors import ConfigError, DataError, FormatError

FASHION_MEAN, FASHION_STD = (0.2860,), (0.3530,)
BUNDLED: dict[str, tuple[str, dict[str, Any]]] = {
    "fashion_vit": (
        "VisionTransformer",
        {
            "img_size": 28,
            "patch_size": 4,
            "in_chans": 1,
            "num_classes": 10,
            "embed_dim": 80,
            "depth": 6,
            "num_heads": 4,
        },
    ),
    "fashion_swin": (
        "SwinTransformer",
        {
            "img_size": 28,
            "patch_size": 2,
            "in_chans": 1,
            "num_classes": 10,
            "embed_dim": 32,
            "depths": (2, 2),
            "num_heads": (2, 4),
            "window_size": 7,
        },
    ),
}
DEFAULT_MODEL = "fashion_vit"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """How to build a model's architecture again, without its weights."""

    kind: Literal["timm", "bundled", "user", "detector"]
    name: str
    options: Mapping[str, Any]

    def build(self) -> nn.Module:
        """The architecture with arbitrary weights, in evaluation mode."""
        if self.kind == "bundled":
            return bundled_architecture(self.name).eval()
        if self.kind == "timm":
            return _timm_model(self.name, pretrained=False, **self.options).eval()
        raise ConfigError(
            f"the checkpoint holds a {self.name}, which lampq cannot build by itself: "
            "give the float model, lampq.load(path, model=...)"
        )

    def to_json(self) -> dict[str, Any]:
        """The fields, ready for a file header."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class FloatModel:
    """A float model with where it came from."""

    model: nn.Module
    source: ModelSource


@dataclass(frozen=True, slots=True)
class LoadedModel(FloatModel):
    """A classifier, with how its input is prepared."""

    preprocessing: Preprocessing


def _timm_model(name: str, *, pretrained: bool, **options: Any) -> nn.Module:
    import timm

    base = name.split(".")[0].removeprefix("timm/")
    if not timm.is_model(base):
        near = timm.list_models(f"*{base.split('_')[0]}*")[:5]
        hint = f"; near: {', '.join(near)}" if near else ""
        raise ConfigError(
            f"unknown model {name!r}; bundled: {', '.join(BUNDLED)}, or any timm name{hint}"
        )
    try:
        model: nn.Module = timm.create_model(name, pretrained=pretrained, **options)
    except (RuntimeError, OSError, ValueError, TypeError) as error:
        what = "its pre-trained weights" if pretrained else "it"
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"model {name!r}: timm cannot load {what} ({first}); give a local file with --weights"
        ) from error
    return model


def bundled_architecture(name: str, **more: Any) -> nn.Module:
    """A bundled model before its weights are loaded; ``more`` goes to its class."""
    import timm.models.swin_transformer
    import timm.models.vision_transformer

    if name not in BUNDLED:
        raise ConfigError(f"unknown bundled model {name!r}; known: {', '.join(BUNDLED)}")
    kind, options = BUNDLED[name]
    classes: dict[str, Any] = {
        "VisionTransformer": timm.models.vision_transformer.VisionTransformer,
        "SwinTransformer": timm.models.swin_transformer.SwinTransformer,
    }
    model: nn.Module = classes[kind](**options, **more)
    return model


def read_weights(path: Path) -> dict[str, Tensor]:
    """A state dict from a .safetensors file, or from a .pth by weights-only loading."""
    if not path.is_file():
        raise ConfigError(f"no weights file {str(path)!r}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state: Any = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise FormatError(
            f"cannot read weights from {str(path)!r}: it is damaged, or holds more than tensors "
            f"({type(error).__name__})"
        ) from error
    for wrapper in ("state_dict_ema", "state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(wrapper), dict):
            state = state[wrapper]
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise FormatError(f"{str(path)!r} holds no state dict (names to tensors)")
    return {key.removeprefix("module."): value for key, value in state.items()}


def load_state(model: nn.Module, state: Mapping[str, Tensor], where: str) -> None:
    """Load a state dict strictly, naming the first key that does not fit."""
    expected = model.state_dict()
    for key, value in state.items():
        if key not in expected:
            raise FormatError(f"{where}: tensor {key!r} is not in the model")
        if value.shape != expected[key].shape:
            raise FormatError(
                f"{where}: tensor {key!r} has shape {tuple(value.shape)}, "
                f"the model needs {tuple(expected[key].shape)}"
            )
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise FormatError(f"{where}: tensor {key!r} contains NaN or infinite values")
    for key in expected:
        if key not in state:
            raise FormatError(f"{where}: tensor {key!r} of the model is missing")
    model.load_state_dict({k: v.to(expected[k].dtype) for k, v in state.items()})


def load_model(name: str, weights: Path | None = None) -> LoadedModel:
    """A float model by name: bundled, or timm's with local or pre-trained weights."""
    if name in BUNDLED:
        model = bundled_architecture(name)
        source = ModelSource("bundled", name, {})
        path = weights or Path(str(files("lampq") / "bundled" / f"{name}.safetensors"))
        load_state(model, read_weights(path), str(path))
        how = Preprocessing(FASHION_MEAN, FASHION_STD, crop_pct=1.0, size=28)
        return LoadedModel(tag(model.eval(), source), source, how)
    state = None if weights is None else read_weights(weights)
    options: dict[str, Any] = {}
    classes = None if state is None else _classes(state)
    if classes is not None:
        options["num_classes"] = classes
    model = _timm_model(name, pretrained=state is None, **options)
    if state is not None:
        load_state(model, state, str(weights))
    check_finite(model)
    source = ModelSource("timm", name, options)
    return LoadedModel(tag(model.eval(), source), source, preprocessing_of(model))


def _classes(state: Mapping[str, Tensor]) -> int | None:
    for key in ("head.weight", "head.fc.weight"):
        if key in state:
            return len(state[key])
    return None


def check_finite(model: nn.Module) -> None:
    """Raise if a parameter is NaN or infinite."""
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise FormatError(f"parameter {name!r} contains NaN or infinite values")


def preprocessing_of(model: nn.Module) -> Preprocessing:
    """What timm's configuration of the model says of its input."""
    import timm.data

    data: dict[str, Any] = timm.data.resolve_model_data_config(model)  # type: ignore
    return Preprocessing(
        mean=tuple(data["mean"]),
        std=tuple(data["std"]),
        crop_pct=float(data["crop_pct"]),
        size=int(data["input_size"][-1]),
    )


def tag(model: nn.Module, source: ModelSource) -> nn.Module:
    """The model, remembering its source."""
    model.lampq_source = source  # type: ignore[assignment]
    return model


def source_of(model: nn.Module) -> ModelSource:
    """The source of a model: remembered, found through timm, or the user's own class."""
    known = getattr(model, "lampq_source", None)
    if isinstance(known, ModelSource):
        return known
    own = ModelSource("user", type(model).__name__, {})
    configuration = getattr(model, "pretrained_cfg", None) or {}
    name = configuration.get("architecture") if isinstance(configuration, dict) else None
    if not name:
        return own
    options: dict[str, Any] = {"num_classes": getattr(model, "num_classes", 1000)}
    embed = getattr(model, "patch_embed", None)
    if getattr(embed, "img_size", None) is not None:
        options["img_size"] = tuple(embed.img_size)  # type: ignore[union-attr]
    found = ModelSource("timm", name, options)
    try:
        rebuilt = found.build()
    except ConfigError:
        return own
    return found if _same_function(model, rebuilt, configuration, options) else own


@torch.no_grad()
def _same_function(
    model: nn.Module,
    rebuilt: nn.Module,
    configuration: Mapping[str, Any],
    options: Mapping[str, Any],
) -> bool:
    """Whether the rebuilt model with the model's weights gives its answers on one random input."""
    channels, height, width = configuration.get("input_size", (3, 224, 224))
    height, width = options.get("img_size", (height, width))
    image = torch.randn(1, channels, height, width, generator=torch.Generator().manual_seed(0))
    was_training = model.training
    try:
        rebuilt.load_state_dict(model.state_dict())
        return bool(torch.allclose(rebuilt(image), model.eval()(image), rtol=1e-4, atol=1e-5))
    except (RuntimeError, AssertionError):
        return False
    finally:
        model.train(was_training)


def bundled_samples(split: Literal["calib", "eval"]) -> Samples:
    """The bundled Fashion-MNIST pictures: 1,024 for calibration, 2,000 for evaluation."""
    import numpy as np

    path = Path(str(files("lampq") / "bundled" / "fashion_images.npz"))
    if not path.is_file():
        raise DataError(f"the bundled pictures {str(path)!r} are missing: install lampq again")
    with np.load(path, allow_pickle=False) as stored:
        images = torch.from_numpy(stored[f"{split}_images"])[:, None]
        labels = torch.from_numpy(stored[f"{split}_labels"].astype(np.int64))
    return Samples(images, labels, FASHION_MEAN, FASHION_STD)
