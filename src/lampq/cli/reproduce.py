"""lampq reproduce."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lampq.cli import app, arguments, guarded
from lampq.cli.jobs import detector_table
from lampq.cli.labs import (
    DETECTION,
    Place,
    check_detector,
    check_pictures,
    check_task,
    classifier_lab,
    detector_lab,
    load,
)
from lampq.config import make_config, read_toml
from lampq.data import list_folder
from lampq.errors import ConfigError
from lampq.models import BUNDLED, DEFAULT_MODEL, FloatModel, LoadedModel
from lampq.reproduce import ALL, PARTS, named
from lampq.reproduce.folder import check_asked, compute, finished, open_folder, write
from lampq.reproduce.full import Checkpoint, checkpoints, needs_table, runnable
from lampq.reproduce.lab import Asked
from lampq.reproduce.part import Found, Part
from lampq.reproduce.pictures import require_matplotlib
from lampq.terminal import TerminalProgress, print_tables
from lampq.typed import names, numbers

# the whole of it on the bundled model takes some minutes
QUICK: dict[str, int] = {"images": 256, "iterations": 40}
QUICK_EVAL, QUICK_STEPS = 1000, 100
# literally the paper: it has no way back to the uniform plan
PAPER: dict[str, Any] = {"preset": "paper", "fallback": "none", "seed": 0}


@app.command("reproduce")
@guarded
def reproduce_command(
    name: Annotated[
        str | None, typer.Argument(help=f"{', '.join(PARTS)}, or {ALL}", metavar="NAME")
    ] = None,
    model: Annotated[
        str, typer.Argument(help="a timm name, or a bundled one; a detector")
    ] = DEFAULT_MODEL,
    weights: arguments.Weights = None,
    calib: arguments.Calib = None,
    calib_annotations: arguments.CalibAnnotations = None,
    evaluation: arguments.Evaluation = None,
    eval_annotations: arguments.EvalAnnotations = None,
    out: Annotated[Path, typer.Option(help="folder to write, or to go on in")] = Path(
        "runs/reproduce"
    ),
    bits: Annotated[str | None, typer.Option(help="widths instead of the paper's: 4,3")] = None,
    rows: Annotated[str | None, typer.Option(help="methods of a table: adalog,lampq")] = None,
    images: arguments.Images = None,
    eval_images: Annotated[int | None, typer.Option(help="evaluation images to use")] = None,
    iterations: Annotated[
        int | None, typer.Option(help="training steps a block of QDrop and PD-Quant")
    ] = None,
    synthesis_steps: Annotated[
        int | None, typer.Option(help="steps of a batch of zero-shot pictures")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="paper (the default) or best")] = None,
    seed: arguments.Seed = None,
    config: Annotated[Path | None, typer.Option(help="TOML file of common options")] = None,
    mean: arguments.Mean = None,
    std: arguments.Std = None,
    crop_pct: arguments.CropPct = None,
    with_pictures: Annotated[
        bool, typer.Option("--pictures/--no-pictures", help="draw them, with matplotlib")
    ] = True,
    full: Annotated[
        bool, typer.Option("--full", help="list what the paper's own rows need; run what is here")
    ] = False,
    weights_folder: Annotated[
        Path | None, typer.Option("--checkpoints", help="folder of weights, for --full")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the results as JSON")] = False,
    quiet: arguments.Quiet = False,
) -> None:
    """Make a table or figure of the paper on any model; without a name, list them."""
    if name is None and not full:
        for part in PARTS.values():
            print(f"{part.name:18} {part.place:16} {part.title}")
        print(f"{ALL:18} {'':16} all of them but {DETECTION}, which needs another model")
        return
    parts = named(name)
    if len(parts) > 1 and (bits or rows):
        raise ConfigError("--bits and --rows are for one table or figure: name it")
    if with_pictures:
        require_matplotlib()
    given = {"preset": preset, "seed": seed, "images": images, "iterations": iterations}
    task = parts[0].task
    quick = model in BUNDLED and calib is None and evaluation is None and not full
    options = {
        **PAPER,
        **(QUICK if quick else {}),
        **({} if config is None else read_toml(config)),
        **{key: value for key, value in given.items() if value is not None},
    }
    detector = detector_table(options.pop("detector", None)) if task == DETECTION else None
    console = Console(stderr=True)
    place = Place(
        *(calib, calib_annotations, evaluation, eval_annotations, mean, std, crop_pct, out),
        with_pictures,
        progress=lambda: TerminalProgress(console, quiet=quiet or as_json),
        tell=not (quiet or as_json),
        detector=detector or {},
    )
    check_task(task, options, place)
    options |= {"task": task} if task == DETECTION else {}
    options["images"] = make_config(options).images
    asked = Asked(
        options,
        numbers(bits, "bits", float) or (),
        names(rows, "rows"),
        _positive(eval_images, "eval-images") or (QUICK_EVAL if quick else None),
        _positive(synthesis_steps, "synthesis-steps") or (QUICK_STEPS if quick else None),
    )
    for part in parts:
        check_asked(part, asked)
    command = _command(name, model, weights, place, asked, quick)
    try:
        if full:
            if weights is not None or model != DEFAULT_MODEL or any((mean, std, crop_pct)):
                raise ConfigError(
                    "--full has its own models: leave MODEL, --weights, --mean, --std and "
                    "--crop-pct out"
                )
            found = _full(parts, place, asked, weights_folder, command)
        elif weights_folder is not None:
            raise ConfigError("--checkpoints is for --full; give one file with --weights")
        else:
            found = _one_model(_of_task(parts, task, place), model, weights, place, asked, command)
    except KeyboardInterrupt:
        print("lampq: interrupted; the same command goes on where it stopped", file=sys.stderr)
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps({"results": found}, indent=2))


def _of_task(parts: Sequence[Part], task: str, place: Place) -> list[Part]:
    """The parts of one task; it is told which are left out, because they need another model."""
    for part in parts:
        if part.task != task:
            place.progress().note(
                f"{part.name} is left out: it needs a detector and COCO pictures, and is made by "
                f"lampq reproduce {part.name}"
            )
    return [part for part in parts if part.task == task]


def _positive(value: int | None, name: str) -> int | None:
    if value is not None and value < 1:
        raise ConfigError(f"{name} must be at least 1, got {value}")
    return value


def _command(
    name: str | None, model: str, weights: Path | None, place: Place, asked: Asked, quick: bool
) -> str:
    """The command that makes the same numbers again, without its paths' folders."""
    own = make_config({key: asked.options.get(key) for key in ("preset", "task")})
    flags: dict[str, Any] = {
        **{flag: path.name for flag, path in place.files(weights).items() if path is not None},
        **{"--mean": place.mean, "--std": place.std, "--crop-pct": place.crop_pct},
        "--bits": ",".join(f"{width:g}" for width in asked.bits) or None,
        "--rows": ",".join(asked.rows) or None,
        **{f"--{key}": asked.options[key] for key in ("preset", "images", "seed")},
        "--iterations": asked.options.get("iterations"),
        "--eval-images": asked.eval_images,
        "--synthesis-steps": asked.synthesis_steps,
    }
    defaults = {
        **{"--preset": "paper", "--seed": 0, "--images": QUICK["images"] if quick else own.images},
        **({"--iterations": QUICK["iterations"], "--eval-images": QUICK_EVAL} if quick else {}),
        **({"--synthesis-steps": QUICK_STEPS} if quick else {}),
    }
    words = ["lampq", "reproduce", *([name] if name else ["--full"])]
    words += [] if model == DEFAULT_MODEL else [model]
    for flag, value in flags.items():
        if value is not None and value != defaults.get(flag):
            words += [flag, str(value)]
    return shlex.join(words)


def _one_model(
    parts: Sequence[Part],
    model: str,
    weights: Path | None,
    place: Place,
    asked: Asked,
    command: str,
) -> list[Found]:
    """Run the parts on one model and write their files."""
    task = parts[0].task
    if task == DETECTION:
        check_detector(model, weights, place)
    else:
        check_pictures(parts, model, place)
    for part in parts:
        finished(part, place.out, asked)
    loaded = load(task, model, weights, place)
    return _run(parts, loaded, weights, place, asked, command)


def _run(
    parts: Sequence[Part],
    loaded: FloatModel,
    weights: Path | None,
    place: Place,
    asked: Asked,
    command: str,
) -> list[Found]:
    """What the parts find on a loaded model; their files are written as each is done."""
    inputs = place.inputs(loaded.source.name, weights)
    work = open_folder(place.out, inputs)
    if isinstance(loaded, LoadedModel):
        scored = any(part.scored for part in parts)
        lab = classifier_lab(loaded, weights, place, asked, work, scored)
    else:
        lab = detector_lab(loaded, weights, place, asked, work)
    found = []
    for number, part in enumerate(parts, 1):
        place.progress().note(f"{number}/{len(parts)} {part.name} on {loaded.source.name}")
        own = lab if part.scored else replace(lab, evaluation=None)
        one, new = compute(part, own, place.out, inputs, _named(command, part))
        state = f"done in {one['seconds']:.0f} s" if new else "was finished before"
        place.progress().note(f"{number}/{len(parts)} {part.name}: {state}")
        _write(part, [one], place)
        found.append(one)
    return found


def _named(command: str, part: Part) -> str:
    """The command of one part, where several were asked for at once."""
    return re.sub(rf"reproduce {ALL}\b", f"reproduce {part.name}", command)


def _write(part: Part, found: Sequence[Found], place: Place) -> None:
    files = write(part, found, place.out, pictures=place.with_pictures)
    if place.tell:
        print_tables(part.tables(found), files)


def _full(
    parts: Sequence[Part],
    place: Place,
    asked: Asked,
    folder: Path | None,
    command: str,
) -> list[Found]:
    """List what the paper's rows need, and run those whose weights and images are here."""
    models = checkpoints(parts, folder)
    for pictures_folder in place.given("classification"):
        if pictures_folder is not None and parts[0].task != DETECTION:
            list_folder(pictures_folder)
    if place.tell:
        print_tables([needs_table(parts, models, place.given)], [])
    here = [part for part in parts if runnable(part, place.given(part.task))]
    by_part: dict[str, list[Found]] = {part.name: [] for part in here}
    for one in models:
        own = [part for part in here if one.label in part.models]
        if one.path is not None and own:
            for found in _checkpoint(one, own, place, asked, command):
                by_part[found["part"]].append(found)
    for part in here:
        if part.joined and by_part[part.name]:
            _write(part, by_part[part.name], place)
    every = [found for some in by_part.values() for found in some]
    if not every and place.tell:
        print("nothing of it can be run here: give --checkpoints DIR, --calib DIR and --eval DIR")
    return every


def _checkpoint(
    one: Checkpoint, parts: Sequence[Part], place: Place, asked: Asked, command: str
) -> list[Found]:
    """The parts of one model of the paper, in a folder of its own."""
    own = replace(place, out=place.out / one.label.replace(" ", "-"))
    loaded = load(parts[0].task, one.name, one.path, own)
    return _run(parts, loaded, one.path, own, asked, command)
