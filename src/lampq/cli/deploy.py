"""lampq export and lampq bench."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from lampq import bench
from lampq.artifact.checkpoint import Header, read_checkpoint, write_atomically
from lampq.bench.chart import chart, require_matplotlib
from lampq.cli import app, guarded
from lampq.cli.jobs import coco_samples
from lampq.cli.zero_shot import GivenPictures, Run, pictures_of_run
from lampq.config import EVEN, RunConfig, make_config
from lampq.data import Samples, list_folder
from lampq.errors import ConfigError
from lampq.export import IMAGES, Export, check_runtimes, export_onnx, profile_of
from lampq.export_detector import IMAGES as FEW
from lampq.export_detector import PyramidExport, export_pyramid
from lampq.inputs import (
    calibration_samples,
    evaluation_samples,
    load_alone,
    load_float,
    pictures,
)
from lampq.models import preprocessing_of
from lampq.prepare import prepare
from lampq.progress import Progress
from lampq.report.folder import read_report, remake_page
from lampq.runfolder import Job, fingerprint_of, open_work, read_plan, run_job
from lampq.terminal import TerminalProgress, print_bench
from lampq.typed import height_and_width, names, numbers
from lampq.types import INTEGER_BITS
from lampq.zero_shot import check_synthetic, read_made

if TYPE_CHECKING:
    from lampq.detection.samples import DetectionSamples

PROFILES = ("accuracy", "speed")
# made pictures, a folder of real ones, or None for bundled ones
Calibration = GivenPictures | Path | None


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint, and the report of the run that made it, if there is one."""

    checkpoint: Path
    header: Header
    report: dict[str, Any] | None

    @classmethod
    def of(cls, path: Path) -> Source:
        """A run folder, or a checkpoint in or outside one."""
        checkpoint = path / "model.safetensors" if path.is_dir() else path
        header, _ = read_checkpoint(checkpoint)
        folder = checkpoint.parent
        report = read_report(folder) if (folder / "report.json").is_file() else None
        return cls(checkpoint, header, report)

    def given(self, key: str) -> Path | None:
        """A path that the run was given, as its report tells."""
        found = None if self.report is None else self.report.get("data", {}).get(key)
        return None if found in (None, "None") else Path(str(found))

    def calibration(self, calib: Path | None) -> Calibration:
        """Where calibration pictures are: those given, or those of the run."""
        made = None
        if calib is None and self.report is not None:
            made = pictures_of_run(self.checkpoint.parent, self.report.get("data", {}))
        folder = calib or (self.given("calib") if made is None else made.folder)
        if folder is None and self.header.source.kind != "bundled":
            raise ConfigError("an export is verified on calibration pictures: give --calib DIR")
        if folder is not None and calib is None and not folder.is_dir():
            raise ConfigError(
                f"the calibration pictures of the run are no longer in {str(folder)!r}: "
                "give --calib DIR"
            )
        if made is not None:
            check_synthetic(made.folder, self.header.source)
        elif folder is not None:
            list_folder(folder)
        return made or folder

    def pictures(self, where: Calibration, count: int, progress: Progress) -> Samples:
        """Some of these pictures, as the model takes them."""
        how = self.header.preprocessing or preprocessing_of(self.header.source.build())
        options: dict[str, Any] = {"limit": count, "progress": progress}
        if isinstance(where, GivenPictures):
            return read_made(where.folder, self.header.source, how, **options)
        return pictures("calib", where, how, **options).subset(count, 0)

    def annotated(
        self, calib: Path | None, annotations: Path | None, count: int, progress: Progress
    ) -> DetectionSamples:
        """Some pictures for a detector with what is in them: those given, or those of the run."""
        folder = calib or self.given("calib")
        file = annotations or self.given("calib_annotations")
        if folder is None or file is None:
            raise ConfigError(
                "an export is verified on calibration pictures: give --calib DIR and "
                "--calib-annotations FILE"
            )
        classes = self.header.content["source"]["options"]["classes"]
        return coco_samples(file, folder, classes, progress, limit=count)


@app.command("export")
@guarded
def export_command(
    run: Annotated[Path, typer.Argument(help="run folder, or its model.safetensors")],
    to: Annotated[str, typer.Option(help="format: onnx")] = "onnx",
    profile: Annotated[
        str | None,
        typer.Option(help="accuracy or speed; a run of the other one is fitted again"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="file to write, default: model.onnx beside the checkpoint")
    ] = None,
    calib: Annotated[
        Path | None, typer.Option(help="calibration pictures, default: those of the run")
    ] = None,
    calib_annotations: Annotated[
        Path | None, typer.Option(help="COCO file of what is in them (detectors)")
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(help="height x width of the images (detectors), default: of the first"),
    ] = None,
    images: Annotated[
        int | None,
        typer.Option(help=f"pictures to compare on, default: {IMAGES}, of detectors {FEW}"),
    ] = None,
    runtimes: Annotated[
        str | None, typer.Option(help="to verify in, default: all that are installed")
    ] = None,
    any_cpu: Annotated[
        bool,
        typer.Option(
            "--any-cpu/--vnni",
            help="right on every processor, or only with 8-bit dot products and a little faster",
        ),
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress")] = False,
) -> None:
    """Write a quantized model as ONNX, verified in every runtime."""
    if to != "onnx":
        raise ConfigError(f"unknown format {to!r}; known: onnx")
    if profile is not None and profile not in PROFILES:
        raise ConfigError(f"unknown profile {profile!r}; known: {', '.join(PROFILES)}")
    if images is not None and images < 1:
        raise ConfigError(f"images must be at least 1, got {images}")
    if out is not None and (out.suffix != ".onnx" or out.is_dir()):
        raise ConfigError(f"the file to write must be called like model.onnx, got {str(out)!r}")
    engines = check_runtimes(names(runtimes, "runtimes"))
    source = Source.of(run)
    fixed = height_and_width(size)
    progress = TerminalProgress(Console(stderr=True), quiet=quiet or as_json)
    if source.header.source.kind == "detector":
        if profile == "speed":
            raise ConfigError("detectors have no profile speed: leave --profile out")
        shown = source.annotated(calib, calib_annotations, images or FEW, progress)
        made = export_pyramid(
            source.checkpoint,
            out or source.checkpoint.with_name("model.onnx"),
            shown,
            size=fixed,
            runtimes=engines,
            any_cpu=any_cpu,
            progress=progress,
        )
        print(json.dumps(made.to_json()) if as_json else _told(made))
        return
    if fixed is not None or calib_annotations is not None:
        raise ConfigError("--size and --calib-annotations are for detectors: leave them out")
    where = source.calibration(calib)
    if profile is not None and profile != profile_of(source.header):
        source = refitted(source, profile, where, progress)
    samples = source.pictures(where, images or IMAGES, progress)
    target = out or source.checkpoint.with_name("model.onnx")
    done = export_onnx(
        source.checkpoint, target, samples, runtimes=engines, any_cpu=any_cpu, progress=progress
    )
    scores = (source.report or {}).get("scores", {})
    top1 = scores.get("mixed", {}).get("top1")
    if as_json:
        print(json.dumps({**done.to_json(), "checkpoint": str(source.checkpoint), "top1": top1}))
    else:
        _tell(done, source, top1)


def _told(done: PyramidExport) -> str:
    """What was written of a detector, for people."""
    height, width = done.size
    lines = [
        f"{done.path}: {done.bytes / 1e6:.3f} MB, backbone and pyramid for images of {height} x "
        f"{width}, any number of them"
    ]
    lines += [
        f"{one.runtime} {one.version}: {len(one.integer)} layers on integer kernels, "
        f"{len(one.floating)} in float by design, largest error of a layer {one.error:.1e} of its "
        f"range, in float {one.float_error:.1e}; the levels differ from torch by "
        f"{one.difference:.1e} of their deviation on {one.images} pictures (torch in double "
        f"precision: {one.own_difference:.1e})"
        for one in done.verified
    ]
    return "\n".join(lines)


def _tell(done: Export, source: Source, top1: float | None) -> None:
    """What was written, for people."""
    print(f"{done.path}: {done.size / 1e6:.3f} MB, profile {done.profile}")
    print(f"packed  {source.checkpoint}: {source.checkpoint.stat().st_size / 1e6:.3f} MB")
    if top1 is not None:
        print(f"top-1 of this profile {top1:.2f} %, see report.json beside it")
    for one in done.verified:
        own = (
            ""
            if one.own_agreement is None
            else f" (torch in double precision: {one.own_agreement:.2f} %)"
        )
        print(
            f"{one.runtime} {one.version}: {len(one.integer)} layers on integer kernels, "
            f"{len(one.floating)} in float by design, largest error of a layer {one.error:.1e} of "
            f"its range, in float {one.float_error:.1e}; same answer as torch on "
            f"{one.agreement:.2f} % of {one.images} images{own}"
        )


def refitted(source: Source, profile: str, where: Calibration, progress: Progress) -> Source:
    """The same plan fitted for the other profile, in a run folder inside that of the run."""
    report = source.report
    if report is None:
        raise ConfigError(
            f"the checkpoint was quantized for {profile_of(source.header)}: to fit its plan again "
            f"for {profile}, give the run folder with its report.json"
        )
    out = source.checkpoint.parent / profile
    plan_file = source.checkpoint.parent / "plan.json"
    plan = read_plan(plan_file)
    if (out / "report.json").is_file():
        if read_plan(out / "plan.json") != plan:
            raise ConfigError(f"{str(out)!r} holds a run with another plan: remove it first")
        return Source.of(out)
    settings = _settings(report["config"], profile)
    data = report["data"]
    evaluation = source.given("eval")
    calib = None if isinstance(where, GivenPictures) else where
    load = load_alone if isinstance(where, GivenPictures) else load_float
    loaded = load(data["model"], source.given("weights"), calib, evaluation)
    prepare(loaded.model, settings, plan=plan)
    how = source.header.preprocessing or loaded.preprocessing
    inputs = {**{k: data.get(k) for k in ("model", "weights", "eval")}, "calib": str(calib)}
    inputs["plan"] = str(plan_file)
    if isinstance(where, GivenPictures):
        inputs["zero_shot"] = where.to_json()
    unfinished = (out / ".lampq" / "run.json").is_file()
    work = open_work(out, fingerprint_of(settings, inputs), resume=unfinished)
    if isinstance(where, GivenPictures):
        run = Run(loaded, source.given("weights"), how, settings, out, progress)
        samples, inputs["synthesis"] = where.samples(run)
    else:
        samples = calibration_samples(calib, how, settings.images, settings.seed, progress)
    scored = evaluation_samples(loaded, calib, evaluation, how, progress)
    run_job(
        Job(loaded.model, loaded.source, samples, scored, settings, plan, how, inputs),
        out,
        work,
        progress,
    )
    return Source.of(out)


def _settings(options: Mapping[str, Any], profile: str) -> RunConfig:
    """The options of a run for the other profile; choices that it has not are left out."""
    changed: dict[str, Any] = {"profile": profile, **(EVEN if profile == "speed" else {})}
    for name in ("choices", "act_choices"):
        widths = options.get(name) or ()
        narrow = [bits for bits in widths if bits <= INTEGER_BITS]
        if profile == "speed" and narrow:
            changed[name] = narrow
    return make_config({**options, **changed})


@app.command("bench")
@guarded
def bench_command(
    run: Annotated[Path, typer.Argument(help="run folder, or its model.safetensors")],
    runtimes: Annotated[str | None, typer.Option(help="default: all that are installed")] = None,
    batches: Annotated[str, typer.Option(help="numbers of images at once")] = "1,32",
    threads: Annotated[str, typer.Option(help="numbers of threads")] = "1,2",
    rounds: Annotated[int, typer.Option(help="rounds in which all take their turn")] = 7,
    clock: Annotated[
        str, typer.Option(help="wall, or cpu: for one thread on a busy machine")
    ] = "wall",
    out: Annotated[
        Path | None, typer.Option(help="folder for bench.json, bench.png and bench.svg")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress")] = False,
) -> None:
    """Measure size and speed against torch and the runtimes' own forms.

    In the folder of a finished run the time for one image goes to speed.json and to its page.
    """
    source = Source.of(run)
    if source.header.source.kind == "detector":
        raise ConfigError("lampq bench measures classifiers, and this is a detector")
    how = bench.settings(
        names(runtimes, "runtimes"),
        batches=numbers(batches, "batches", int),
        threads=numbers(threads, "threads", int),
        rounds=rounds,
        clock=clock,
    )
    if out is not None:
        require_matplotlib()
        if out.exists() and not out.is_dir():
            raise ConfigError(f"{str(out)!r} is a file, and the numbers go into a folder")
    progress = TerminalProgress(Console(stderr=True), quiet=quiet or as_json)
    found = bench.bench(source.checkpoint, how, progress)
    if out is not None:
        write_atomically(out / "bench.json", (json.dumps(found, indent=2) + "\n").encode())
        for form in ("png", "svg"):
            write_atomically(out / f"bench.{form}", chart(found, form))
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        print_bench(found, out)
    speed = bench.for_page(found)
    if speed is not None and run.is_dir() and source.report is not None:
        write_atomically(run / "speed.json", (json.dumps(speed, indent=2) + "\n").encode())
        remake_page(run)
