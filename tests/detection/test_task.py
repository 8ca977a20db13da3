"""Detectors through the whole of LampQ: statistics, metrics, plans, files."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import QUICK, tiny_detector, tiny_samples
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection.roi_heads import RoIHeads

import lampq
from lampq.calibrate import LayerStats, collect
from lampq.config import make_config
from lampq.detection.models import detection_losses
from lampq.detection.sites import behind_backbone, detector_graph
from lampq.detection.task import DetectionTask
from lampq.errors import ConfigError, FormatError
from lampq.graph.attention import explicit
from lampq.graph.discover import verify_norms
from lampq.methods.base import LinearView
from lampq.metrics.fisher import fisher_traces
from lampq.pipeline import Result, quantize
from lampq.quant.modules import QuantLayer
from lampq.tokens import tokens_of
from lampq.types import DETECTOR_ROLES, LayerRole

pytest.importorskip("faster_coco_eval")
# random detectors get notices: the uniform plan scores better, or a probe does not hurt
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def result() -> Result:
    return quantize(tiny_detector(), tiny_samples(), seed=1, **QUICK)


def _levels(model: nn.Module) -> dict[str, Tensor]:
    image = torch.rand(1, 3, 44, 60, generator=torch.Generator().manual_seed(0))
    found: dict[str, Tensor] = model.backbone(image)  # type: ignore[operator]
    return found


def test_every_layer_of_a_detector_is_found_and_has_its_role() -> None:
    model = explicit(tiny_detector())
    found = {layer.name: layer.role for layer in detector_graph(model).layers}
    kinds = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)
    assert set(found) == {n for n, m in model.named_modules() if isinstance(m, kinds)}
    assert found["backbone.patch_embed.proj"] is LayerRole.PATCH_EMBED
    assert found["backbone.layers.1.downsample.reduction"] is LayerRole.REDUCTION
    assert found["backbone.fpn.layer_blocks.0.0"] is LayerRole.NECK
    assert found["rpn.head.cls_logits"] is LayerRole.RPN
    assert found["roi_heads.mask_predictor.conv5_mask"] is LayerRole.ROI_HEAD


def test_a_cascade_has_the_layers_of_all_stages() -> None:
    names = {layer.name for layer in behind_backbone(explicit(tiny_detector(cascade=True)))}
    assert all(f"roi_heads.stages.{i}.box_predictor.cls_score" in names for i in range(3))


def test_norms_before_padded_windows_can_be_folded() -> None:
    task = DetectionTask()
    model = explicit(tiny_detector())
    graph = detector_graph(model)
    images = tiny_samples().inputs(slice(0, 2))
    assert verify_norms(model, graph, images, task.outputs) == graph


@torch.no_grad()
def test_recorded_inputs_give_the_outputs_of_the_layers_in_all_their_calls() -> None:
    task, samples = DetectionTask(), tiny_samples().pick([1])
    model = explicit(tiny_detector())
    graph = detector_graph(model)
    seen: dict[str, list[Tensor]] = {layer.name: [] for layer in graph.layers}
    for name, found in seen.items():
        model.get_submodule(name).register_forward_hook(
            lambda _m, _i, output, found=found: found.append(output.clone())
        )
    stats = collect(model, graph, samples, max_tokens=100_000, passes=task)
    assert len(seen["rpn.head.cls_logits"]) % 3 == 0, "three levels"
    for layer in graph.layers:
        view, rows = LinearView.of(model, layer), stats[layer.name]
        assert isinstance(rows, LayerStats)
        got = rows.inputs @ view.weight.T + view.bias
        if layer.block >= 0 or layer.role is LayerRole.REDUCTION:
            continue  # as in classifiers
        wanted = []
        for output in seen[layer.name]:
            patches = isinstance(model.get_submodule(layer.name), nn.ConvTranspose2d)
            maps = F.pixel_unshuffle(output, 2) if patches else output
            wanted.append(maps.movedim(1, -1).flatten(0, -2))
        torch.testing.assert_close(got, torch.cat(wanted), rtol=1e-3, atol=1e-4)


def test_the_losses_repeat_and_their_gradient_gives_the_trace() -> None:
    task, samples = DetectionTask(), tiny_samples().pick([0])
    model = explicit(tiny_detector()).double()
    graph = detector_graph(model)
    (images, targets) = next(samples.batches(1))
    images = [image.double() for image in images]
    doubled = replace(samples)

    class Doubled:
        def __len__(self) -> int:
            return len(doubled)

        def batches(self, _size: int) -> Any:
            return iter([(images, targets)])

    name = graph.allocatable[1].name
    weight = model.get_submodule(name).weight
    weight.requires_grad = True  # type: ignore[union-attr]
    loss = sum(detection_losses(model, images, targets).values())
    again = sum(detection_losses(model, images, targets).values())
    assert torch.equal(loss, again)
    (slope,) = torch.autograd.grad(loss, weight)
    weight.requires_grad = False  # type: ignore[union-attr]
    found = fisher_traces(model, graph.allocatable, Doubled(), passes=task)  # type: ignore[arg-type]
    assert found[name] == pytest.approx(float(slope.square().sum()), rel=1e-5)


def test_a_detector_is_quantized_within_its_budget(result: Result) -> None:
    assert result.plan.mean_weight_bits <= 4
    assert set(result.plan) == {layer.name for layer in result.graph.allocatable}
    mixed, plain = (result.calibration[n].signal("loss") for n in ("mixed", "uniform"))
    assert mixed >= plain


def test_neck_and_heads_have_the_target_width(result: Result) -> None:
    layers = [m for m in result.model.modules() if isinstance(m, QuantLayer)]
    behind = [m for m in layers if m.spec.role in DETECTOR_ROLES]
    assert {str(m.bits) for m in behind} == {"4/4"}
    assert {m.spec.name for m in behind} == {s.name for s in behind_backbone(tiny_detector())}


def test_the_float_detector_stays_as_it_is(result: Result) -> None:
    before = copy.deepcopy(tiny_detector()).state_dict()
    quantize(tiny_detector(), tiny_samples(), **{**QUICK, "exchanges": 0})
    after = tiny_detector().state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize(("bits", "shown"), [("float", set()), (8, {"8/8"})])
def test_heads_may_stay_in_float_or_have_a_width_of_their_own(
    bits: str | int, shown: set[str]
) -> None:
    options = {**QUICK, "exchanges": 0, "metric": "recon", "head_bits": bits}
    model = quantize(tiny_detector(), tiny_samples(), **options).model
    layers = [m for m in model.modules() if isinstance(m, QuantLayer)]
    assert {str(m.bits) for m in layers if m.spec.role in DETECTOR_ROLES} == shown


def test_a_loaded_detector_is_the_saved_one_bit_for_bit(result: Result, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    result.save(path)
    loaded = lampq.load(path)
    first, second = _levels(result.model), _levels(loaded)
    assert all(torch.equal(first[name], second[name]) for name in first)
    images = tiny_samples().inputs(slice(0, 2))
    for one, other in zip(result.model(images), loaded(images), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_file_that_was_changed_is_refused(result: Result, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    result.save(path)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(FormatError, match="changed"):
        lampq.load(path)


@pytest.mark.parametrize("method", ["adalog", "apq", "erq", "gptq", "psaq", "ptq4vit", "repq"])
def test_every_method_fits_pictures_of_several_sizes(method: str) -> None:
    options = {**QUICK, "method": method, "metric": "recon", "choices": (4,), "exchanges": 0}
    found = quantize(tiny_detector(), tiny_samples(2), **options)
    assert torch.isfinite(torch.cat([x.flatten() for x in _levels(found.model).values()])).all()


@pytest.mark.parametrize(
    "options",
    [
        {"metric": "fisher"},
        {"metric": "fisher", "alpha_signal": "ap", "alpha_trace": "quantized"},
        {"metric": "hawq"},
        {"metric": "loss"},
        {"metric": "nuclear", "allocator": "vtptq", "configurations": 20},
        {"metric": "output", "accept": "ap"},
        {"metric": "output", "exchange_error": "cumulative", "ratios": "paper"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_metrics_and_exchanges_work_on_detectors(options: dict[str, Any]) -> None:
    found = quantize(tiny_detector(), tiny_samples(2), **{**QUICK, "exchanges": 1, **options})
    assert found.plan.mean_weight_bits <= 4
    assert found.sensitivity is not None
    assert bool((found.sensitivity.table.cost == found.sensitivity.table.cost).all())


def test_a_cascade_is_quantized_and_saved(tmp_path: Path) -> None:
    model = tiny_detector(cascade=True)
    found = quantize(model, tiny_samples(2), **{**QUICK, "exchanges": 0, "metric": "recon"})
    found.save(tmp_path / "model.safetensors")
    images = tiny_samples().inputs(slice(0, 1))
    loaded = lampq.load(tmp_path / "model.safetensors")
    assert torch.equal(found.model(images)[0]["boxes"], loaded(images)[0]["boxes"])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"reconstruct": "distill"}, "cannot be reconstructed"),
        ({"accept": "kl"}, "accept must be ap or loss for detection, got kl"),
        ({"labels": "model"}, "labels cannot be model for detection"),
        ({"metric": "kl"}, "metric cannot be kl for detection"),
        ({"profile": "speed"}, "profile cannot be speed"),
        ({"head_bits": 11}, "head_bits must be in 1..10"),
        ({"head_bits": "half"}, "head_bits must be"),
    ],
)
def test_options_that_detectors_have_not_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make_config({"task": "detection", **options})


def test_average_precision_is_no_score_of_a_classifier() -> None:
    with pytest.raises(ConfigError, match="accuracy or loss or kl for classification, got ap"):
        make_config({"accept": "ap"})


def test_presets_of_detectors_take_the_loss_or_the_average_precision() -> None:
    best, paper = (make_config({"task": "detection", "preset": p}) for p in ("best", "paper"))
    assert (best.accept, best.alpha_signal, best.labels) == ("loss", "loss", "data")
    assert (paper.accept, paper.alpha_signal, paper.metric) == ("ap", "ap", "fisher")


def test_samples_of_another_task_are_refused(case: Any) -> None:
    with pytest.raises(ConfigError, match="the task is classification, and the samples are"):
        quantize(tiny_detector(), tiny_samples(), config=make_config({}))
    with pytest.raises(ConfigError, match=r"not a (VisionTransformer|SwinTransformer)"):
        quantize(case.original, tiny_samples())


def test_a_transposed_convolution_is_a_matrix_of_patches() -> None:
    module = nn.ConvTranspose2d(3, 5, 2, 2)
    model = nn.Sequential(module)
    view = LinearView.of(
        model, replace(detector_graph(explicit(tiny_detector())).layers[0], name="0")
    )
    x = torch.randn(2, 3, 4, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        right = F.pixel_unshuffle(module(x), 2).permute(0, 2, 3, 1).flatten(0, 2)
    torch.testing.assert_close(tokens_of(module, x) @ view.weight.T + view.bias, right)


@pytest.mark.parametrize("method", ["minmax", "adalog", "repq"])
@pytest.mark.parametrize("cascade", [False, True])
@torch.no_grad()
def test_a_picture_in_which_nothing_is_found_has_no_boxes_and_no_masks(
    method: str, cascade: bool
) -> None:
    model, samples = tiny_detector(cascade=cascade), tiny_samples()
    options = {**QUICK, "method": method, "choices": (4,), "metric": "recon", "exchanges": 0}
    quantized = quantize(model, samples, config=make_config({"task": "detection", **options})).model
    for module in quantized.modules():
        if isinstance(module, RoIHeads):
            module.score_thresh = 1.1
    (found,) = quantized(samples.inputs(slice(0, 1)))
    assert len(found["boxes"]) == len(found["scores"]) == 0
    assert found["masks"].shape == (0, 1, *samples.sizes[0])
