from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import Case
from torch.nn import functional as F

from lampq.data import Preprocessing
from lampq.errors import ConfigError
from lampq.zero_shot import RECIPES, Synthesis
from lampq.zero_shot.base import NO_CLASS, Answer, Subject, drawn_view
from lampq.zero_shot.canvas import Canvas, variation
from lampq.zero_shot.leaves import LARGEST, SMALLEST, dead_leaves, pink_noise, radii
from lampq.zero_shot.psaq import PSAQRecipe
from lampq.zero_shot.pyramid import PyramidPainting, PyramidRecipe

IMAGENET = Preprocessing(size=224)
SMALL = Canvas(Preprocessing(size=32))
recipes = pytest.mark.parametrize("name", list(RECIPES))


@pytest.fixture(scope="module")
def subject(vit: Case) -> Subject:
    return Subject.of(vit.original, SMALL)


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _answer(logits: torch.Tensor, *entropies: float) -> Answer:
    return Answer(logits, [torch.tensor(value) for value in entropies or (0.0,)])


@recipes
def test_a_recipe_carries_the_name_it_is_registered_by(name: str) -> None:
    assert RECIPES.get(name)().name == name
    assert RECIPES.get(name)(steps=7).steps == 7


@recipes
def test_classes_are_those_of_the_model_and_the_same_for_a_seed(name: str) -> None:
    recipe = RECIPES.get(name)()
    labels = recipe.labels(range(32, 64), 10, 3)
    assert len(labels) == 32
    assert set(labels.tolist()) <= {*range(10), NO_CLASS}
    assert torch.equal(labels, recipe.labels(range(32, 64), 10, 3))
    assert not torch.equal(labels, recipe.labels(range(32, 64), 10, 4))
    assert not torch.equal(labels, recipe.labels(range(64, 96), 10, 3))


@recipes
def test_a_start_is_the_same_for_the_same_generator(name: str, subject: Subject) -> None:
    recipe, labels = RECIPES.get(name)(), torch.tensor([1, 2])
    first, again, other = (
        recipe.begin(subject, SMALL, labels, _generator(seed)).finished() for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@recipes
def test_finished_pictures_are_within_range(name: str, subject: Subject) -> None:
    painting = RECIPES.get(name)().begin(subject, SMALL, torch.tensor([1, 2]), _generator())
    with torch.no_grad():
        for parameter in painting.parameters:
            parameter.mul_(100).add_(5)
    painting.settle()
    finished = painting.finished()
    assert finished.shape == SMALL.shape(2)
    assert bool((finished >= SMALL.low - 1e-5).all())
    assert bool((finished <= SMALL.high + 1e-5).all())


@recipes
def test_what_is_shown_carries_a_gradient_to_every_parameter(name: str, subject: Subject) -> None:
    painting = RECIPES.get(name)().begin(subject, SMALL, torch.tensor([1, 2]), _generator())
    painting.shown(0).square().sum().backward()
    assert all(p.grad is not None and float(p.grad.abs().sum()) > 0 for p in painting.parameters)


def test_the_published_schedule_warms_up_and_falls_twice(subject: Subject) -> None:
    painting = PSAQRecipe().begin(subject, SMALL, torch.tensor([1]), _generator())
    for start in (0, 500):
        assert painting.rate(start) == pytest.approx(0.2 / 100)
        assert painting.rate(start + 49) == pytest.approx(0.2 * 50 / 100)
        assert painting.rate(start + 99) == pytest.approx(0.2)
        assert painting.rate(start + 100) == pytest.approx(0.2)
        expected = 0.2 * 0.5 * (1 + math.cos(math.pi * 200 / 400))
        assert painting.rate(start + 300) == pytest.approx(expected)
        assert painting.rate(start + 499) < 1e-4


def test_windows_have_the_published_higher_rate(swin: Case) -> None:
    canvas = Canvas(Preprocessing((0.5,), (0.5,), 1.0, 28))
    windowed = Subject.of(swin.original, canvas)
    assert windowed.windows
    painting = PSAQRecipe().begin(windowed, canvas, torch.tensor([1]), _generator())
    assert painting.rate(99) == pytest.approx(0.25)


def test_few_steps_have_both_phases(subject: Subject) -> None:
    painting = PSAQRecipe(steps=5).begin(subject, SMALL, torch.tensor([1]), _generator())
    assert [painting._phase(step) for step in range(5)] == [
        (0, 0, 3),
        (0, 1, 3),
        (0, 2, 3),
        (1, 0, 2),
        (1, 1, 2),
    ]


@pytest.mark.parametrize(("step", "limit"), [(0, 2), (999, 4)], ids=["first", "second"])
def test_jitter_is_along_the_diagonal_and_wider_in_the_second_phase(
    subject: Subject, step: int, limit: int
) -> None:
    # 15 and 30 pixels of 224 are 2 and 4 of 32
    painting = PSAQRecipe().begin(subject, SMALL, torch.tensor([1]), _generator())
    whole = painting.images.detach()
    allowed = [
        view
        for offset in range(-limit, limit + 1)
        for rolled in [torch.roll(whole, (offset, offset), (2, 3))]
        for view in (rolled, rolled.flip(3))
    ]
    seen = set()
    for _ in range(80):
        shown = painting.shown(step).detach()
        (place,) = [i for i, view in enumerate(allowed) if torch.equal(view, shown)]
        seen.add(place)
    assert {0, 1, len(allowed) - 2, len(allowed) - 1} <= seen


def test_a_view_of_no_jitter_is_the_picture_or_its_mirror_image() -> None:
    images = torch.randn(1, 1, 4, 4, generator=_generator())
    generator = _generator()
    views = [drawn_view(images, 0, generator) for _ in range(20)]
    assert {torch.equal(view, images) for view in views} == {True, False}
    assert all(torch.equal(v, images) or torch.equal(v, images.flip(3)) for v in views)


def test_the_loss_is_made_of_its_three_terms() -> None:
    canvas = Canvas(Preprocessing(size=16))
    labels = torch.tensor([0, 2])
    unused: Subject = Subject(torch.nn.Identity(), {}, 0, False, 3)
    painting = PSAQRecipe().begin(unused, canvas, labels, _generator())
    # the published numbers are for 32 pictures of 3 x 224 x 224
    assert 2500 <= painting.target * 14 <= 3000
    logits = torch.tensor([[1.0, 0.0, -1.0], [0.5, 0.5, 2.0]])
    shown = painting.images.detach()
    rough = float(variation(shown)) * math.sqrt(32 / 2)
    expected = float(F.cross_entropy(logits, labels)) + 0.05 * abs(rough - painting.target) - 0.7
    found = float(painting.loss(shown, _answer(logits, 0.5, 0.2)))
    assert found == pytest.approx(expected, rel=1e-5)


def test_the_variation_is_that_of_the_picture_whatever_its_normalisation(subject: Subject) -> None:
    other = Canvas(Preprocessing((0.5,) * 3, (0.452,) * 3, 1.0, 32))
    paintings = [
        PSAQRecipe().begin(subject, canvas, torch.tensor([1]), _generator())
        for canvas in (SMALL, other)
    ]
    assert paintings[1].factor / paintings[0].factor == pytest.approx(2.0)


@pytest.mark.parametrize("plain", [0.0, 0.5, 0.75])
@pytest.mark.parametrize("classes", [3, 10, 100])
def test_the_pyramid_makes_all_classes_equally_often(classes: int, plain: float) -> None:
    recipe = PyramidRecipe(plain=plain)
    whole = torch.cat([recipe.labels(range(s, s + 7), classes, 0) for s in range(0, 210, 7)])
    counts = torch.bincount(whole[whole != NO_CLASS], minlength=classes)
    assert int(counts.max() - counts.min()) <= 1
    assert int(counts.sum()) == math.ceil(210 * (1 - plain))
    assert torch.equal(whole, recipe.labels(range(210), classes, 0))


def test_every_other_picture_is_plain_whatever_the_batch() -> None:
    recipe = PyramidRecipe()
    whole = recipe.labels(range(9), 10, 0)
    assert (whole == NO_CLASS).tolist() == [False, True] * 4 + [False]
    singly = [recipe.labels(range(number, number + 1), 10, 0) for number in range(9)]
    assert torch.equal(torch.cat(singly), whole)


def test_plain_pictures_stay_as_they_start(subject: Subject) -> None:
    def begun(*labels: int) -> PyramidPainting:
        return PyramidRecipe().begin(subject, SMALL, torch.tensor(labels), _generator())

    painting, start = begun(1, NO_CLASS, 2), begun(1, 0, 2).finished()
    torch.testing.assert_close(painting.finished(), start)
    with torch.no_grad():
        for parameter in painting.parameters:
            parameter.add_(1)
    changed = (painting.finished() - start).abs().amax(dim=(1, 2, 3))
    assert [bool(most > 0.1) for most in changed] == [True, False, True]
    # nor are they shown to the model
    assert len(painting.shown(0)) == 2
    logits = torch.zeros(2, 3)
    assert painting.loss(painting.shown(0), _answer(logits)).isfinite()


def test_a_picture_that_is_sure_enough_is_not_made_surer(subject: Subject) -> None:
    recipe = PyramidRecipe(entropy_weight=0.0, variation_weight=0.0, sure=(0.6, 0.6))
    painting = recipe.begin(subject, SMALL, torch.tensor([0, 0]), _generator())
    sure, unsure = math.log(0.7 / 0.3), math.log(0.5 / 0.5)
    logits = torch.tensor([[sure, 0.0], [unsure, 0.0]], requires_grad=True)
    painting.loss(painting.finished(), _answer(logits)).backward()
    assert logits.grad is not None
    assert float(logits.grad[0].abs().sum()) == 0
    assert float(logits.grad[1].abs().sum()) > 0


def test_the_variation_of_the_start_costs_nothing(subject: Subject) -> None:
    recipe = PyramidRecipe(entropy_weight=0.0, class_weight=0.0)
    painting = recipe.begin(subject, SMALL, torch.tensor([0]), _generator())
    logits = torch.zeros(1, 2)
    assert float(painting.loss(painting.finished(), _answer(logits))) == pytest.approx(0, abs=1e-5)
    assert float(painting.loss(2 * painting.finished(), _answer(logits))) == pytest.approx(1.0)


def test_colour_moves_less_than_brightness(subject: Subject) -> None:
    painting = PyramidRecipe(colour=0.25).begin(subject, SMALL, torch.tensor([0]), _generator())
    mixing = painting._mixing
    torch.testing.assert_close(mixing.T @ mixing, torch.diag(torch.tensor([1, 0.0625, 0.0625])))
    # brightness is the same for all channels, and colour leaves it alone
    torch.testing.assert_close(mixing.sum(dim=0)[1:], torch.zeros(2))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [17, 32])
def test_leaves_cover_pictures_of_any_size(channels: int, size: int) -> None:
    picture = dead_leaves(channels, size, _generator())
    assert picture.shape == (channels, size, size)
    assert 0 <= float(picture.min()) < float(picture.max()) <= 1
    assert torch.equal(picture, dead_leaves(channels, size, _generator()))


def test_leaves_have_flat_parts_and_edges_where_noise_has_neither() -> None:
    picture = dead_leaves(1, 64, _generator())[0]
    steps = (picture[:, 1:] - picture[:, :-1]).abs().flatten()
    # of noise the ratio of mean and median of such steps is about 1.2
    assert float(steps.mean() / steps.median()) > 1.5


def test_radii_follow_the_power_law() -> None:
    found = radii(100_000, SMALLEST, _generator())
    assert SMALLEST * 0.999 <= float(found.min()) <= float(found.max()) <= LARGEST * 1.001
    # of density r**-3, the median is that of r**-2 half way between its ends
    middle = ((SMALLEST**-2 + LARGEST**-2) / 2) ** -0.5
    assert float(found.median()) == pytest.approx(middle, rel=0.01)


def test_the_amplitude_of_pink_noise_falls_with_frequency() -> None:
    noise = pink_noise(300, 64, 1.0, _generator())
    torch.testing.assert_close(noise.std(dim=(1, 2)), torch.ones(300))
    amplitude = torch.fft.rfft2(noise).abs().mean(dim=0)[0]
    # four times the frequency, a quarter of the amplitude
    assert float(amplitude[4] / amplitude[16]) == pytest.approx(4, rel=0.2)


WRONG = {
    "images": ({"images": 0}, "images must be at least 1, got 0"),
    "batch": ({"batch": -2}, "batch must be at least 1, got -2"),
    "steps": ({"steps": 0}, "steps must be at least 1, got 0"),
    "seed": ({"seed": -1}, r"seed must be in 0\.\.2\*\*63 - 1, got -1"),
    "precision": (
        {"precision": "half"},
        "precision must be one of auto, float32, bfloat16, got 'half'",
    ),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_setting_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Synthesis(**options)


def test_batches_divide_the_pictures() -> None:
    assert Synthesis(70, batch=32).batches == (range(32), range(32, 64), range(64, 70))
    assert Synthesis(5, batch=32).batches == (range(5),)
