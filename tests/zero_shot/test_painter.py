from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import pytest
import timm
import torch
from conftest import Case
from torch import Tensor, nn

import lampq
from lampq.data import Preprocessing
from lampq.errors import ConfigError, GraphError
from lampq.evaluate import divergence, predict
from lampq.graph.families import RolePattern
from lampq.models import load_model
from lampq.progress import Progress
from lampq.types import LayerRole
from lampq.zero_shot import RECIPES, Synthesis
from lampq.zero_shot.base import Subject
from lampq.zero_shot.canvas import Canvas
from lampq.zero_shot.painter import Batch, answer_of, batches
from lampq.zero_shot.similarity import patch_entropy

T = TypeVar("T")
VIT = Preprocessing(size=32)
SWIN = Preprocessing((0.5,), (0.5,), 1.0, 28)
recipes = pytest.mark.parametrize("recipe", list(RECIPES))


class Memory:
    """A store in memory."""

    def __init__(self) -> None:
        self.kept: dict[str, Mapping[str, Tensor]] = {}

    def load(self, key: str) -> Mapping[str, Tensor] | None:
        return self.kept.get(key)

    def save(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        self.kept[key] = {name: tensor.clone() for name, tensor in tensors.items()}


class Stopping(Progress):
    """Interrupts after so many steps, as Ctrl-C does."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def track(self, items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
        for number, item in enumerate(items):
            if number == self.steps:
                raise KeyboardInterrupt
            yield item


def how_of(case: Case) -> Preprocessing:
    return VIT if case.samples.images.shape[1] == 3 else SWIN


def same(one: list[Batch], other: list[Batch]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels)
        for a, b in zip(one, other, strict=True)
    )


@pytest.fixture
def subject(vit: Case) -> Subject:
    return Subject.of(vit.original, Canvas(VIT))


@recipes
def test_pictures_of_windows_and_of_whole_attention_are_made(case: Case, recipe: str) -> None:
    how = how_of(case)
    samples = lampq.synthesize(case.original, 3, recipe=recipe, steps=2, batch=2, how=how)
    assert samples.images.dtype == torch.uint8
    assert samples.images.shape == Canvas(how).shape(3)
    assert (samples.mean, samples.std) == (how.mean, how.std)
    labels = samples.require_labels("a test")
    assert (len(labels), labels.dtype) == (3, torch.int64)
    assert len(torch.unique(samples.images.flatten(1), dim=0)) == 3


@recipes
def test_the_same_seed_gives_the_same_pictures_whatever_was_drawn_before(
    vit: Case, recipe: str
) -> None:
    def made(seed: int) -> Tensor:
        torch.rand(3)
        options: dict[str, Any] = {"recipe": recipe, "steps": 3, "batch": 2, "how": VIT}
        return lampq.synthesize(vit.original, 3, seed=seed, **options).images

    assert torch.equal(made(0), made(0))
    assert not torch.equal(made(0), made(1))


@recipes
@pytest.mark.parametrize("stop", [1, 4, 6])
def test_an_interrupted_synthesis_goes_on_to_the_same_pictures(
    subject: Subject, recipe: str, stop: int
) -> None:
    settings, canvas = Synthesis(5, recipe, 3, 2), Canvas(VIT)
    store = Memory()
    with pytest.raises(KeyboardInterrupt):
        batches(subject, canvas, settings, progress=Stopping(stop), store=store)
    assert set(store.kept) == {f"batch {n}" for n in range(stop // 3)}
    assert same(batches(subject, canvas, settings, store=store), batches(subject, canvas, settings))


def test_stored_batches_are_not_made_again(subject: Subject) -> None:
    settings, canvas, store = Synthesis(4, "psaq", 2, 2), Canvas(VIT), Memory()
    batches(subject, canvas, settings, store=store)
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    handle = subject.model.register_forward_pre_hook(count)
    assert len(batches(subject, canvas, settings, store=store)) == 2
    handle.remove()
    assert calls == 0


@recipes
def test_pictures_in_bfloat16_have_entropies_in_single_precision(
    subject: Subject, recipe: str
) -> None:
    shown = torch.randn(Canvas(VIT).shape(4), generator=torch.Generator().manual_seed(0))
    exact, rounded = (answer_of(subject, shown, kind) for kind in ("float32", "bfloat16"))
    for one, other in zip(
        (exact.logits, *exact.entropies), (rounded.logits, *rounded.entropies), strict=True
    ):
        assert other.dtype == torch.float32
        assert not torch.equal(one, other)
        torch.testing.assert_close(other, one, rtol=0.1, atol=0.05)
    settings = [Synthesis(2, recipe, 2, 2, precision=kind) for kind in ("float32", "bfloat16")]
    single, half = (batches(subject, Canvas(VIT), one) for one in settings)
    assert not same(single, half)


def test_more_pictures_begin_with_the_same_ones(subject: Subject) -> None:
    canvas = Canvas(VIT)
    few = batches(subject, canvas, Synthesis(2, "pyramid", 2, 2))
    more = batches(subject, canvas, Synthesis(4, "pyramid", 2, 2))
    assert same(few, more[:1])


def test_the_model_never_sees_more_than_a_batch(subject: Subject) -> None:
    seen: list[int] = []
    handle = subject.model.register_forward_pre_hook(lambda _m, given: seen.append(len(given[0])))
    batches(subject, Canvas(VIT), Synthesis(7, "psaq", 2, 3))
    handle.remove()
    assert max(seen) == 3
    # two steps and a last look at each of the batches of 3, 3 and 1
    assert seen == [3, 3, 3, 3, 3, 3, 1, 1, 1]


def test_progress_counts_every_step_of_every_batch(subject: Subject) -> None:
    told: list[tuple[int, int | None]] = []

    class Counting(Progress):
        def track(self, items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
            number = 0
            for item in items:
                number += 1
                yield item
            told.append((number, total))

    batches(subject, Canvas(VIT), Synthesis(5, "psaq", 4, 2), progress=Counting())
    assert told == [(12, 12)]


def test_the_float_model_stays_as_it_is(vit: Case) -> None:
    before = {key: value.clone() for key, value in vit.original.state_dict().items()}
    trained = [p.requires_grad for p in vit.original.parameters()]
    lampq.synthesize(vit.original, 2, steps=2, how=VIT)
    assert all(torch.equal(vit.original.state_dict()[k], v) for k, v in before.items())
    assert [p.requires_grad for p in vit.original.parameters()] == trained
    assert all(p.grad is None for p in vit.original.parameters())


@recipes
@pytest.mark.parametrize("name", ["fashion_vit", "fashion_swin"])
def test_steps_make_the_classes_of_the_pictures_more_probable(name: str, recipe: str) -> None:
    loaded = load_model(name)
    canvas = Canvas(loaded.preprocessing)
    subject = Subject.of(loaded.model, canvas)

    def likelihood(steps: int) -> float:
        (batch,) = batches(subject, canvas, Synthesis(6, recipe, steps, 6))
        return float(batch.probabilities.log().mean())

    assert likelihood(24) > likelihood(1) + 0.1


def test_probabilities_are_those_of_the_stored_bytes(vit: Case, subject: Subject) -> None:
    (batch,) = batches(subject, Canvas(VIT), Synthesis(3, "psaq", 2, 3))
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (VIT.mean, VIT.std))
    with torch.no_grad():
        whole = vit.original((batch.images.float() / 255 - mean) / std).softmax(dim=1)
    expected = whole[torch.arange(3), batch.labels]
    torch.testing.assert_close(batch.probabilities, expected, rtol=1e-4, atol=1e-6)
    assert torch.equal(batch.right, whole.argmax(dim=1) == batch.labels)


def test_the_class_of_a_picture_made_for_none_is_the_models_answer(
    vit: Case, subject: Subject
) -> None:
    first, second = batches(subject, Canvas(VIT), Synthesis(3, "pyramid", 2, 2))
    assert (first.named.tolist(), second.named.tolist()) == ([True, False], [True])
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (VIT.mean, VIT.std))
    answers = vit.original((first.images.float() / 255 - mean) / std).argmax(dim=1)
    assert int(first.labels[1]) == int(answers[1])
    assert bool(first.right[1])


def test_a_batch_of_plain_pictures_is_not_shown_to_the_model_but_once(subject: Subject) -> None:
    seen: list[int] = []
    handle = subject.model.register_forward_pre_hook(lambda _m, given: seen.append(len(given[0])))
    made = batches(subject, Canvas(VIT), Synthesis(3, "pyramid", 2, 1))
    handle.remove()
    assert seen == [1, 1, 1, 1, 1, 1, 1]
    assert [bool(batch.named) for batch in made] == [True, False, True]
    (whole,) = batches(subject, Canvas(VIT), Synthesis(3, "pyramid", 2, 3))
    assert whole.named.tolist() == [True, False, True]


def test_the_entropy_is_that_of_the_product_with_the_values(case: Case) -> None:
    subject = Subject.of(case.original, Canvas(how_of(case)))
    products = [site.name for site in case.graph.matmuls if site.kind == "av"]
    assert len(subject.attentions) == len(products) == len(case.graph.blocks)
    images = case.samples.images
    answer = answer_of(subject, images, "float32")
    torch.testing.assert_close(answer.logits, case.model(images), rtol=1e-4, atol=1e-4)
    outputs: dict[str, Tensor] = {}
    handles = [
        case.model.get_submodule(name).register_forward_hook(
            lambda _m, _a, output, name=name: outputs.__setitem__(name, output)
        )
        for name in products
    ]
    case.model(images)
    for handle in handles:
        handle.remove()
    for found, name in zip(answer.entropies, products, strict=True):
        mixed = outputs[name].mean(dim=1)  # (images * windows, tokens, channels of a head)
        expected = patch_entropy(mixed, 1, len(images), subject.prefix)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
        assert float(expected) != 0


@pytest.mark.parametrize(
    ("options", "prefix"),
    [({}, 1), ({"class_token": False, "global_pool": "avg"}, 0), ({"reg_tokens": 2}, 3)],
    ids=["class-token", "patches-only", "registers"],
)
def test_tokens_that_are_no_patches_are_counted(options: dict[str, Any], prefix: int) -> None:
    model = timm.models.vision_transformer.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=12, depth=1, num_heads=2, num_classes=3, **options
    )
    assert Subject.of(model, Canvas(VIT)).prefix == prefix


def test_an_attention_of_another_kind_will_do() -> None:
    options = {"depth": 1, "embed_dim": 24, "num_heads": 2, "num_classes": 3, "img_size": 32}
    model = timm.create_model("vit_relpos_small_patch16_224", **options)
    samples = lampq.synthesize(model, 2, steps=1, how=VIT)
    assert len(samples) == 2


@pytest.mark.parametrize("method", ["adalog", "erq", "psaq", "repq"])
def test_every_method_is_fitted_on_made_pictures(vit: Case, method: str) -> None:
    samples = lampq.synthesize(vit.original, 4, steps=1, how=VIT)
    options: dict[str, Any] = {"method": method, "bits": 8, "choices": (8,), "exchanges": 0}
    result = lampq.quantize(vit.original, samples, metric="recon", **options)
    exact = predict(vit.original, samples)
    assert 0 < divergence(predict(result.model, samples), exact) < 0.01


def test_a_model_without_projections_is_refused(vit: Case) -> None:
    only = (RolePattern("*.mlp.fc1", LayerRole.FC1),)
    with pytest.raises(GraphError, match="no layer plays the role proj"):
        lampq.synthesize(vit.original, 1, how=VIT, patterns=only)


def test_a_size_that_the_model_cannot_take_is_refused(vit: Case) -> None:
    with pytest.raises(GraphError, match=r"cannot take pictures of shape \(3, 40, 40\)"):
        lampq.synthesize(vit.original, 1, how=Preprocessing(size=40))


def test_a_model_without_classes_is_refused(vit: Case) -> None:
    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = vit.original

        def forward(self, x: Tensor) -> Tensor:
            features: Tensor = self.inner.forward_features(x)  # type: ignore[operator]
            return features

    with pytest.raises(GraphError, match="gives no logits"):
        lampq.synthesize(Features(), 1, how=VIT)


def test_an_unknown_recipe_is_refused_by_name(vit: Case) -> None:
    with pytest.raises(ConfigError, match="unknown recipe 'gan'; known: psaq, pyramid"):
        lampq.synthesize(vit.original, 1, recipe="gan", how=VIT)
