"""synthesize(): pictures from the model alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor, nn

from lampq.data import Preprocessing, Samples
from lampq.graph.families import TIMM, RolePattern
from lampq.hooks import recording
from lampq.models import preprocessing_of
from lampq.progress import Progress
from lampq.reconstruct import NoStore, StateStore
from lampq.reconstruct.precision import Precision, computing
from lampq.zero_shot.base import (
    DEFAULT_IMAGES,
    DEFAULT_RECIPE,
    NO_CLASS,
    Answer,
    Painting,
    Recipe,
    Subject,
    Synthesis,
)
from lampq.zero_shot.canvas import Canvas
from lampq.zero_shot.recipes import RECIPES
from lampq.zero_shot.similarity import patch_entropy


def recipe_of(settings: Synthesis) -> Recipe:
    """The recipe by its name, with the number of steps that is asked for."""
    factory = RECIPES.get(settings.recipe)
    return factory() if settings.steps is None else factory(steps=settings.steps)


@dataclass(frozen=True, slots=True)
class Batch:
    """Finished pictures as bytes, their classes, and how probable the model finds these.

    ``right``: whether the class is the model's answer. The class of a picture that was made for
    none, not ``named``, is that answer. ``seconds`` is what the batch took.
    """

    images: Tensor
    labels: Tensor
    probabilities: Tensor
    right: Tensor
    named: Tensor
    seconds: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """The fields by name, for a store."""
        return {name: getattr(self, name) for name in type(self).__slots__}


def check_model(model: nn.Module, how: Preprocessing) -> None:
    """Raise if no pictures can be made for the model."""
    Subject.of(model, Canvas(how))


def answer_of(subject: Subject, shown: Tensor, precision: Precision) -> Answer:
    """The model's answer to the pictures and the entropy of every attention.

    Only the model is passed in that precision: similarities are near to one another.
    """
    with computing(precision), recording(subject.model, list(subject.attentions)) as seen:
        logits = subject.model(shown).float()
    entropies = [
        patch_entropy(seen[name][0].float(), heads, len(shown), subject.prefix)
        for name, heads in subject.attentions.items()
    ]
    return Answer(logits, entropies)


def paint(
    subject: Subject, recipe: Recipe, painting: Painting, precision: Precision = "auto"
) -> Iterator[int]:
    """Improve a batch step by step; gives the number of every finished step."""
    optimizer = torch.optim.Adam(list(painting.parameters), lr=1.0, betas=recipe.betas)
    for step in range(recipe.steps):
        optimizer.param_groups[0]["lr"] = painting.rate(step)
        optimizer.zero_grad(set_to_none=True)
        with torch.enable_grad():
            shown = painting.shown(step)
            answer = answer_of(subject, shown, precision)
            painting.loss(shown, answer).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        painting.settle()
        yield step


def _finished(
    subject: Subject, canvas: Canvas, painting: Painting, labels: Tensor, seconds: float
) -> Batch:
    images = canvas.to_bytes(painting.finished())
    stored = Samples(images, labels, canvas.how.mean, canvas.how.std)
    with torch.no_grad():
        logits = subject.model(stored.inputs(slice(None)))
    answers, named = logits.argmax(dim=1), labels != NO_CLASS
    labels = torch.where(named, labels, answers)
    probabilities = logits.softmax(dim=1).gather(1, labels[:, None])[:, 0]
    return Batch(images, labels, probabilities, answers == labels, named, torch.tensor(seconds))


def batches(
    subject: Subject,
    canvas: Canvas,
    settings: Synthesis,
    *,
    progress: Progress | None = None,
    store: StateStore | None = None,
) -> list[Batch]:
    """All batches: those that the store has, and the others made and stored one by one.

    A batch depends on the settings and its own number only, so that it makes no difference where
    an earlier run was interrupted.
    """
    recipe, store = recipe_of(settings), store or NoStore()
    done: list[Batch] = []

    def work() -> Iterator[int]:
        for number, pictures in enumerate(settings.batches):
            known = store.load(f"batch {number}")
            if known is not None:
                done.append(Batch(**known))
                yield from range(recipe.steps)
                continue
            start = perf_counter()
            labels = recipe.labels(pictures, subject.classes, settings.seed)
            painting = recipe.begin(subject, canvas, labels, settings.generator(number))
            if bool((labels != NO_CLASS).any()):
                yield from paint(subject, recipe, painting, settings.precision)
            else:
                yield from range(recipe.steps)
            batch = _finished(subject, canvas, painting, labels, perf_counter() - start)
            store.save(f"batch {number}", batch.tensors())
            done.append(batch)

    total = recipe.steps * len(settings.batches)
    label = f"making {settings.images} pictures"
    for _ in (progress or Progress()).track(work(), label, total):
        pass
    return done


def joined(made: list[Batch], how: Preprocessing) -> Samples:
    """The pictures of all batches with their classes."""
    images = torch.cat([batch.images for batch in made])
    labels = torch.cat([batch.labels for batch in made])
    return Samples(images, labels, how.mean, how.std)


def synthesize(
    model: nn.Module,
    images: int = DEFAULT_IMAGES,
    *,
    recipe: str = DEFAULT_RECIPE,
    steps: int | None = None,
    batch: int = 32,
    seed: int = 0,
    precision: Precision = "auto",
    how: Preprocessing | None = None,
    patterns: tuple[RolePattern, ...] = TIMM,
    progress: Progress | None = None,
    store: StateStore | None = None,
) -> Samples:
    """Pictures made from the float model alone, with the classes they were made for.

    Args:
        model: The float model.
        images: How many pictures.
        recipe: The name of a recipe.
        steps: How often a batch is shown to the model; not set, as the recipe says.
        batch: Pictures made at a time: memory grows with it, not with ``images``.
        seed: The seed of every draw.
        precision: In what the passes of the model multiply; ``auto``, in bfloat16 where that is
            faster.
        how: Channels, size, mean and deviation of the model's input; not set, those of timm's
            configuration of the model.
        patterns: Which layer plays which role, for models that timm does not have.
        progress: Told of every step.
        store: Keeps finished batches, for resuming.
    """
    settings = Synthesis(images, recipe, steps, batch, seed, precision)
    canvas = Canvas(how or preprocessing_of(model))
    subject = Subject.of(model, canvas, patterns)
    return joined(batches(subject, canvas, settings, progress=progress, store=store), canvas.how)
