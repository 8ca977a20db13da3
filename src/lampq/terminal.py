"""What a person sees: progress bars and tables."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress
from rich.table import Table

from lampq.progress import Progress
from lampq.report import headline, plan_rows
from lampq.report.scores import interval, parts, shown
from lampq.report.table import COLUMNS, SPREAD_COLUMNS, cells, remarks, spread_cells
from lampq.reproduce.table import Table as Reproduced
from lampq.types import BitPlan

T = TypeVar("T")
NAMES = ("method", "plan", "reconstruct")


# seconds between two lines of progress in a log
LOG_EVERY = 60.0


class TerminalProgress(Progress):
    """Bars with time left on standard error; where that is no terminal, a line now and then."""

    def __init__(
        self, console: Console, *, quiet: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self.console, self.quiet, self.clock = console, quiet, clock
        self._said = clock()

    def track(self, items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
        if self.quiet:
            yield from items
            return
        if not self.console.is_terminal:
            yield from self._logged(items, label, total)
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description:<24}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with RichProgress(*columns, console=self.console, transient=True) as bar:
            task = bar.add_task(label, total=total)
            for item in items:
                yield item
                bar.advance(task)

    def _logged(self, items: Iterable[T], label: str, total: int | None) -> Iterator[T]:
        start = self.clock()
        for done, item in enumerate(items, 1):
            yield item
            now = self.clock()
            if now - self._said < LOG_EVERY:
                continue
            self._said = now
            passed = now - start
            if total is None:
                self.note(f"{label}: {done} done in {minutes(passed)}")
            else:
                left = passed / done * (total - done)
                self.note(f"{label}: {done} of {total}, about {minutes(left)} left")

    def note(self, message: str) -> None:
        if not self.quiet:
            self.console.print(message, highlight=False)


def minutes(seconds: float) -> str:
    """Seconds as minutes and seconds."""
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02d}"


def print_result(report: dict[str, Any], plan: BitPlan, out: Path) -> None:
    """Accuracy, size and plan of a finished run."""
    console = Console()
    table = Table(title=headline(report))
    known = next((list(parts(score)) for score in report["scores"].values()), ["top-1 [%]"])
    sure = all(interval(score) is not None for score in report["scores"].values())
    columns = ("model", *known, *(["±"] if sure else []), "mean weight bits", "file", "smaller")
    for column in columns:
        table.add_column(column, justify="left" if column == "model" else "right")
    float_bytes = report["float_bytes"]
    sizes = {
        "fp32": float_bytes,
        "uniform": report["uniform_bytes"],
        "mixed": report["files"]["model.safetensors"],
    }
    means = {
        "fp32": 32.0,
        "uniform": report["uniform_bits"],
        "mixed": report["bits"]["mean_weight_searched"],
    }
    rows = ["fp32", "uniform", "mixed"]
    if "before_reconstruction" in report["scores"]:
        rows.insert(2, "before_reconstruction")
    for name in rows:
        score = report["scores"].get(name)
        table.add_row(
            name.replace("_", " "),
            *(map(shown, parts(score).values()) if score else ["-"] * len(known)),
            *([shown(interval(score)) if score else "-"] if sure else []),
            f"{means.get(name, means['mixed']):.3g}",
            f"{sizes.get(name, sizes['mixed']) / 1e6:.3f} MB",
            f"{float_bytes / sizes.get(name, sizes['mixed']):.1f}x",
        )
    console.print(table)
    console.print(plan_table(plan))
    # a path is one word, also where it is longer than the line
    for name, files in (
        ("report", "report.html"),
        ("      ", "report.md"),
        ("      ", "report.json"),
        ("model ", "model.safetensors"),
    ):
        console.print(f"{name} {out / files}", highlight=False, soft_wrap=True)


def print_comparison(table: Mapping[str, Any], out: Path) -> None:
    """The rows of a comparison, in the order they were asked for."""
    console = Console()
    title = f"{table['model']['name']}, preset {table['preset']}"
    console.print(narrow_table(title, COLUMNS, [cells(row) for row in table["rows"]]))
    if table["seeds"]:
        rows = [spread_cells(row) for row in table["seeds"]]
        console.print(narrow_table("over seeds", SPREAD_COLUMNS, rows))
    for remark in remarks(table["rows"]):
        console.print(remark, highlight=False, markup=False)
    console.print(f"table {out / 'table.md'}", highlight=False, soft_wrap=True)


def print_tables(tables: Sequence[Reproduced], files: Sequence[Path]) -> None:
    """Reproduced tables with their notes, and where they are written."""
    console = Console()
    for table in tables:
        titles = [escape(column.full) for column in table.columns]
        console.print(narrow_table(table.caption, titles, table.cells()))
        for note in table.notes:
            console.print(f"- {note}", highlight=False, markup=False)
    if files:
        names = ", ".join(path.name for path in files)
        console.print(f"{files[0].parent}: {names}", highlight=False, soft_wrap=True)


def narrow_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table without lines, empty columns and the column of a single seed: fits 80 characters."""
    table = Table(title=title, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    values = [{row[i] for row in rows} - {""} for i in range(len(columns))]
    used = [i for i, v in enumerate(values) if len(v) > (columns[i] == "seed")]
    for i in used:
        side: Literal["left", "right"] = "left" if columns[i] in NAMES else "right"
        # as wide as its values and the words of its title
        wide = max(len(word) for word in (*columns[i].split(), *values[i]))
        table.add_column(columns[i], justify=side, width=wide)
    for row in rows:
        table.add_row(*(row[i] for i in used))
    return table


def plan_table(plan: BitPlan) -> Table:
    """Widths by block and role; weight/activation where the two differ."""
    table = Table(title="bits by block")
    roles = ("qkv", "proj", "fc1", "fc2")
    for column in ("block", *roles):
        table.add_column(column, justify="right")
    for block, row in plan_rows(plan):
        table.add_row(block, *(row.get(role, "") for role in roles))
    return table


def print_bench(found: Mapping[str, Any], out: Path | None) -> None:
    """Times of all forms of a model, and what they mean in words."""
    console = Console()
    settings = sorted({(row["batch"], row["threads"]) for row in found["rows"]})
    for batch, threads in settings:
        images = "1 image" if batch == 1 else f"{batch} images"
        title = f"{found['model']}, {images}, {threads} thread{'s' if threads > 1 else ''}"
        table = Table(title=title, box=None, padding=(0, 1, 0, 0), pad_edge=False)
        for column in ("runtime", "form"):
            table.add_column(column)
        for column in ("ms", "images/s", "x torch fp32", "x same runtime"):
            table.add_column(column, justify="right")
        for row in found["rows"]:
            if (row["batch"], row["threads"]) == (batch, threads):
                table.add_row(
                    row["runtime"],
                    row["kind"],
                    f"{row['milliseconds']:.3g}",
                    f"{row['images_per_second']:.4g}",
                    *(_spread(row[key]) for key in ("against_torch", "against_runtime")),
                )
        console.print(table)
    loading = ", ".join(f"{name} {value:.2f} s" for name, value in found["load_seconds"].items())
    console.print(f"loading the packed file: {loading}", highlight=False)
    for remark in found["remarks"]:
        console.print(remark, highlight=False, markup=False)
    if out is not None:
        console.print(f"chart {out / 'bench.png'}", highlight=False, soft_wrap=True)


def _spread(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"
