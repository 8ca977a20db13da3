"""lampq sweep."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Annotated

import typer
from rich.console import Console

from lampq import sweep
from lampq.cli import app, arguments, fail, guarded
from lampq.errors import ConfigError
from lampq.report.table import Row
from lampq.sweep.results import SCORES, cells, remarks, varied_columns
from lampq.terminal import TerminalProgress, minutes, narrow_table


@app.command("sweep")
@guarded
def sweep_command(
    what: Annotated[
        Path, typer.Argument(metavar="FILE", help="TOML file of the trials, or a folder to look at")
    ],
    out: Annotated[Path, typer.Option(help="folder to write")] = Path("runs/sweep"),
    resume: Annotated[
        bool, typer.Option("--resume", help="continue in --out; the file may have changed")
    ] = False,
    workers: Annotated[
        int | None, typer.Option(help="processes that run trials, default: 1")
    ] = None,
    ray: Annotated[
        str | None, typer.Option(help="address of a Ray cluster, auto, or local to start one")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="print the best trial of each model and budget only")
    ] = False,
    by: Annotated[
        str, typer.Option(help="score on calibration images for --best: kl, loss or accuracy")
    ] = "kl",
    keep: Annotated[
        bool, typer.Option("--keep", help="keep fits and statistics for trials added later")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="check and list the trials, run none")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print rows as JSON")] = False,
    quiet: arguments.Quiet = False,
) -> None:
    """Run the trials of a file over grids and lists of options, or look at finished ones."""
    if by not in SCORES:
        raise ConfigError(f"unknown score {by!r}; known: {', '.join(SCORES)}")
    if what.is_dir():
        out, rows = what, sweep.read_results(what)
    else:
        if workers is not None and workers < 1:
            raise ConfigError(f"workers must be at least 1, got {workers}")
        trials = sweep.read_sweep(what)
        sweep.check_folder(out, resume=resume)
        sweep.check(trials)
        if dry_run:
            _list(trials)
            return
        console = Console(stderr=True)
        rows = _run(trials, out, resume, keep, workers, ray, console, quiet or as_json)
    shown = sweep.best(rows, by) if best else rows
    if as_json:
        print(json.dumps(shown, indent=2))
    elif best:
        for row in shown:
            print(out / row["folder"])
    elif not quiet:
        print_rows(rows, out)
    if rows and all(row["status"] == "failed" for row in rows):
        fail(f"every trial failed, the first because {rows[0]['failure']}")


def _list(trials: Sequence[sweep.Trial]) -> None:
    shares = list(dict.fromkeys(trial.share for trial in trials))
    for trial in trials:
        print(f"{trial.name}  fits {shares.index(trial.share) + 1}")
    print(f"{len(trials)} trials, {len(shares)} sets of fits")


def _run(
    trials: Sequence[sweep.Trial],
    out: Path,
    resume: bool,
    keep: bool,
    workers: int | None,
    ray: str | None,
    console: Console,
    quiet: bool,
) -> list[Row]:
    """Run what is to be run, with a line for each row."""
    start, before = monotonic(), []

    def tell(row: Row, done: int, total: int) -> None:
        before.append(done)
        new = done - before[0] + 1
        left = minutes((monotonic() - start) / new * (total - done))
        top1 = "" if row.get("top1") is None else f", top-1 {row['top1']:.2f}"
        said = row.get("failure") or f"KL {-row['calibration_agreement']:.4g}{top1}"
        TerminalProgress(console, quiet=quiet).note(
            f"{done}/{total} {row['name']}: {said}; about {left} left"
        )

    pool = _pool(out, workers, ray, lambda: TerminalProgress(console, quiet=quiet))
    try:
        return sweep.run(trials, out, pool, resume=resume, keep=keep, on_row=tell)
    except KeyboardInterrupt:
        print(
            "lampq: interrupted (finished trials are kept); continue with the same command and "
            "--resume",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None


def _pool(
    out: Path, workers: int | None, ray: str | None, progress: Callable[[], TerminalProgress]
) -> Callable[[int], sweep.Pool]:
    """Who runs the trials: Ray, processes, or this one."""
    if ray is not None:
        from lampq.sweep.cluster import RayPool

        made = RayPool(ray, out, workers)
        return lambda total: made
    if workers is None or workers == 1:
        return lambda total: sweep.Here(out, progress)
    return lambda total: sweep.Processes(out, min(workers, total))


def print_rows(rows: Sequence[Row], out: Path) -> None:
    """The table of a sweep, as far as it varies, and the best trials."""
    console = Console()
    if rows:
        console.print(narrow_table("", *cells(rows, varied_columns(rows))))
    for remark in remarks(rows):
        console.print(remark, highlight=False, markup=False)
    if any(row["status"] == "finished" for row in rows):
        for row in sweep.best(rows):
            console.print(f"best  {out / row['folder']}", highlight=False, soft_wrap=True)
    console.print(f"table {out / 'sweep.sqlite'}", highlight=False, soft_wrap=True)
