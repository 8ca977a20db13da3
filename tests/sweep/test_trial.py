from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import lampq
import lampq.metrics.fisher
import lampq.pipeline
import lampq.runfolder
import lampq.sweep.trial
from lampq.methods.minmax import MinMax
from lampq.progress import Progress
from lampq.report.table import Row
from lampq.sweep import Trial, read_sweep
from lampq.sweep.trial import Worker, folder_of

FILES = {
    *("model.safetensors", "plan.json", "sensitivity.json", "report.json", "report.md"),
    *("report.html", "histograms.json"),
}
# whatever is expensive and does not depend on gamma
WORK = (
    (MinMax, "fit"),
    (MinMax, "fit_matmul"),
    (lampq.pipeline, "collect"),
    (lampq.metrics.fisher, "fisher_traces"),
    (lampq.metrics.fisher, "quantized_trace"),
    (lampq.runfolder, "_scored"),
)


def counting(counts: Counter[str], name: str, do: Callable[..., Any]) -> Callable[..., Any]:
    def count(*arguments: Any, **named: Any) -> Any:
        counts[name] += 1
        if name == "fit":
            _, view, bits, _ = arguments
            counts[f"fit {view.spec.name} {bits}"] += 1
        return do(*arguments, **named)

    return count


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often each kind of work is done."""
    counts: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for where, name in WORK:
            patch.setattr(where, name, counting(counts, name, getattr(where, name)))
        yield counts


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def pair(quick_sweep: Callable[[str], Path]) -> tuple[Trial, ...]:
    """Two trials that differ in gamma alone."""
    return read_sweep(quick_sweep("[grid]\ngamma = [4.0, 1.5]\n"))


@pytest.fixture(scope="module")
def first(pair: tuple[Trial, ...], out: Path) -> tuple[Row, Counter[str]]:
    with counted() as work:
        return Worker(out).run(pair[0], Progress()), work


@pytest.fixture(scope="module")
def second(
    pair: tuple[Trial, ...], out: Path, first: tuple[Row, Counter[str]]
) -> tuple[Row, Counter[str]]:
    """Run by a worker that has nothing of the first in memory."""
    with counted() as work:
        return Worker(out).run(pair[1], Progress()), work


def test_a_trial_is_a_run_folder_of_its_own(
    pair: tuple[Trial, ...], out: Path, first: tuple[Row, Counter[str]]
) -> None:
    row, _ = first
    assert row["status"] == "finished", row
    folder = out / row["folder"]
    assert {path.name for path in folder.iterdir()} == FILES
    report = json.loads((folder / "report.json").read_text())
    assert report["config"] == json.loads(json.dumps(pair[0].config.to_json()))
    assert report["scores"]["mixed"]["top1"] == row["top1"]
    assert report["calibration"]["mixed"]["agreement"] == row["calibration_agreement"]
    assert row["images_scored"] == 24
    assert row["mean_weight_bits"] <= 4
    assert lampq.load(str(folder / "model.safetensors")) is not None


def test_a_trial_that_differs_in_gamma_alone_repeats_no_work(
    first: tuple[Row, Counter[str]], second: tuple[Row, Counter[str]]
) -> None:
    (before, done), (after, again) = first, second
    assert (before["gamma"], after["gamma"]) == (4.0, 1.5)
    assert after["status"] == "finished", after
    assert (done["collect"], done["fisher_traces"], done["fit_matmul"]) == (1, 1, 12)
    assert (again["collect"], again["fisher_traces"], again["fit_matmul"]) == (0, 0, 0)
    # widths that no plan before has had are fitted; nothing is fitted twice
    assert 10 * again["fit"] < done["fit"]
    twice = [
        name for name, count in (done + again).items() if name.startswith("fit ") and count > 1
    ]
    assert twice == []
    # fp32, uniform and mixed; then the mixed plan alone, if it is another
    assert done["_scored"] == 3
    assert again["_scored"] <= 1


@pytest.mark.slow
def test_a_trial_that_shares_gives_what_it_gives_alone(
    pair: tuple[Trial, ...], tmp_path: Path, out: Path, second: tuple[Row, Counter[str]]
) -> None:
    alone = Worker(tmp_path).run(pair[1], Progress())
    same = ("top1", "calibration_agreement", "mean_weight_bits", "file_bytes", "uniform_top1")
    assert {name: alone[name] for name in same} == {name: second[0][name] for name in same}
    models = [load_file(where / alone["folder"] / "model.safetensors") for where in (tmp_path, out)]
    assert all(bool((models[0][name] == models[1][name]).all()) for name in models[0])


def test_another_method_shares_traces_and_statistics(
    quick_sweep: Callable[[str], Path], tmp_path: Path, out: Path, first: tuple[Row, Counter[str]]
) -> None:
    (trial,) = read_sweep(quick_sweep("").rename(tmp_path / "a.toml"))
    text = (tmp_path / "a.toml").read_text().replace('"minmax"', '"psaq"')
    (tmp_path / "b.toml").write_text(text)
    (other,) = read_sweep(tmp_path / "b.toml")
    assert other.config.method == "psaq"
    assert trial.share != other.share
    with counted() as work:
        row = Worker(out).run(other, Progress())
    assert row["status"] == "finished", row
    assert (work["fisher_traces"], work["collect"]) == (0, 0)


def test_another_width_is_fitted_on_stored_statistics(
    quick_sweep: Callable[[str], Path], out: Path, first: tuple[Row, Counter[str]]
) -> None:
    (trial,) = read_sweep(quick_sweep("[grid]\nbits = [5]\nedge_bits = [6]\n"))
    with counted() as work:
        row = Worker(out).run(trial, Progress())
    assert row["status"] == "finished", row
    assert work["collect"] == 0
    assert 0 < work["fit"] < first[1]["fit"]


def test_a_finished_folder_without_a_row_is_not_made_again(
    pair: tuple[Trial, ...], out: Path, first: tuple[Row, Counter[str]]
) -> None:
    with counted() as work:
        row = Worker(out).run(pair[0], Progress())
    assert not work
    different = {"seconds", "ended"}
    assert {k: v for k, v in row.items() if k not in different} == {
        k: v for k, v in first[0].items() if k not in different
    }


def test_of_two_workers_with_one_trial_the_second_to_finish_gives_way(
    pair: tuple[Trial, ...], out: Path, first: tuple[Row, Counter[str]], tmp_path: Path
) -> None:
    folder = folder_of(out, pair[0])
    before = (folder / "report.json").read_text()
    attempt = tmp_path / "attempt"
    shutil.copytree(folder, attempt)
    Worker(out)._finish(attempt, folder)
    assert not attempt.exists()
    assert (folder / "report.json").read_text() == before


def test_what_goes_wrong_in_a_trial_is_its_row(
    pair: tuple[Trial, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("not enough\nmemory")

    monkeypatch.setattr(lampq.sweep.trial, "run_job", fail)
    row = Worker(tmp_path).run(pair[0], Progress())
    assert (row["status"], row["failure"]) == ("failed", "RuntimeError: not enough memory")
    assert "not enough" in row["traceback"]

    def refuse(*_: object, **__: object) -> None:
        raise lampq.errors.DataError("one sentence")

    monkeypatch.setattr(lampq.sweep.trial, "run_job", refuse)
    row = Worker(tmp_path).run(pair[0], Progress())
    assert (row["failure"], row["traceback"]) == ("one sentence", None)
    assert row["seconds"] > 0
