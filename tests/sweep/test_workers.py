"""Workers that are killed: processes of this machine, and machines of a Ray cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lampq.sweep import Processes, read_results, read_sweep, run
from lampq.sweep.pool import Death

GRID = "[grid]\ngamma = [4.0, 1.5]\nseed = [0, 1]\n"
MINUTES = 60 * 10


def in_the_middle(out: Path) -> tuple[int, str]:
    """Waits for a trial that has a plan and no report; its worker, and its folder."""
    end = time.monotonic() + MINUTES
    while time.monotonic() < end:
        for plan in out.glob(".lampq/attempts/*/plan.json"):
            if not (plan.parent / "report.json").exists():
                name, _, worker = plan.parent.name.rpartition(".")
                return int(worker.rpartition("-")[2]), name
        time.sleep(0.01)
    raise TimeoutError("no trial got as far as a plan")


def finished_names(out: Path) -> set[str]:
    return {row["name"] for row in read_results(out) if row["status"] == "finished"}


@pytest.mark.slow
def test_a_killed_process_loses_no_trial(
    quick_sweep: Callable[[str], Path], tmp_path: Path
) -> None:
    path, out = quick_sweep(GRID), tmp_path / "out"
    command = [sys.executable, "-m", "lampq", "sweep", path, "--out", out, "--workers", "2"]
    sweep = subprocess.Popen([str(word) for word in (*command, "--quiet")])
    try:
        worker, killed = in_the_middle(out)
        os.kill(worker, signal.SIGKILL)
        assert sweep.wait(MINUTES) == 0
    finally:
        sweep.kill()
        sweep.wait()
    trials = read_sweep(path)
    assert finished_names(out) == {trial.name for trial in trials}
    attempts = {row["name"]: row["attempts"] for row in read_results(out)}
    assert attempts == {trial.name: 1 + (trial.name == killed) for trial in trials}
    assert all((out / "trials" / trial.name / "report.html").is_file() for trial in trials)
    assert not (out / ".lampq").exists()


@pytest.mark.slow
def test_a_sweep_that_is_killed_takes_its_workers_along_and_goes_on(
    quick_sweep: Callable[[str], Path], tmp_path: Path
) -> None:
    path, out = quick_sweep(GRID), tmp_path / "out"
    command = [sys.executable, "-m", "lampq", "sweep", path, "--out", out, "--workers", "2"]
    words = [str(word) for word in (*command, "--quiet")]
    sweep = subprocess.Popen(words)
    try:
        worker, _ = in_the_middle(out)
    finally:
        sweep.kill()
        sweep.wait()
    end = time.monotonic() + MINUTES
    while Path(f"/proc/{worker}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    before = {row["name"]: row["ended"] for row in read_results(out)}
    assert len(before) < 4
    assert subprocess.run([*words, "--resume"], check=False).returncode == 0
    after = {row["name"]: row["ended"] for row in read_results(out)}
    assert len(after) == 4
    assert before.items() <= after.items()


def test_a_process_that_dies_is_told_and_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("seed = 1\n")
    (trial,) = read_sweep(tmp_path / "a.toml")
    pool = Processes(tmp_path, 1)
    try:
        pool.start(trial)
        process = pool._processes[0].process
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        assert pool.wait() == (trial, Death("signal 9 (SIGKILL)"))
        assert pool._processes == []
    finally:
        pool.close()


CLUSTER = """
import json, sys
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
print(json.dumps(cluster.address), flush=True)
for line in sys.stdin:
    cluster.remove_node(nodes.pop(), allow_graceful=False)
    print(json.dumps("removed"), flush=True)
cluster.shutdown()
"""


@contextmanager
def cluster_of_two() -> Iterator[tuple[str, Callable[[], None]]]:
    """The address of a Ray cluster of two workers, and what kills one of them."""
    # workers of Ray are at the lowest priority, and would wait for ever on a busy machine
    settings = {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    environment = {**os.environ, **settings}
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def said() -> Any:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('"'):
                return json.loads(line)
        raise ConnectionError("the cluster did not start")

    def kill_one() -> None:
        assert process.stdin is not None
        process.stdin.write("one\n")
        process.stdin.flush()
        assert said() == "removed"

    try:
        yield said(), kill_one
    finally:
        process.stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install lampq[ray]")
def test_a_killed_machine_of_a_cluster_loses_no_trial(
    quick_sweep: Callable[[str], Path], tmp_path: Path
) -> None:
    path, out = quick_sweep(GRID), tmp_path / "out"
    with cluster_of_two() as (address, kill_one):
        command = [sys.executable, "-m", "lampq", "sweep", path, "--out", out, "--ray", address]
        sweep = subprocess.Popen([str(word) for word in (*command, "--quiet")])
        try:
            in_the_middle(out)
            kill_one()
            assert sweep.wait(MINUTES) == 0
        finally:
            sweep.kill()
            sweep.wait()
    trials = read_sweep(path)
    assert finished_names(out) == {trial.name for trial in trials}
    workers = {row["worker"] for row in read_results(out)}
    assert len(workers) >= 1
    assert max(row["attempts"] for row in read_results(out)) >= 2
    assert not (out / ".lampq").exists()


def test_without_ray_one_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lampq.errors import MissingDependencyError
    from lampq.sweep.cluster import RayPool

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'lampq\[ray\]'"):
        RayPool("auto", tmp_path)


def test_nothing_is_started_where_nothing_is_to_do(
    quick_sweep: Callable[[str], Path], tmp_path: Path
) -> None:
    trials = read_sweep(quick_sweep("seed = 3\n"))

    def fail(total: int) -> Any:
        pytest.fail(f"a pool for {total}")

    assert run((), tmp_path, fail) == []
    assert len(trials) == 1
