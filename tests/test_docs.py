"""What the documentation shows exists: commands, flags, options, names, files; and plug-ins run."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
import typer.main
from conftest import Outcome, few_bundled

import lampq
import lampq.errors
from lampq.cli import app
from lampq.config import PAPER, RunConfig
from lampq.methods import METHODS
from lampq.metrics import METRICS
from lampq.reconstruct import FINISHERS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```\s*(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CLI: Any = typer.main.get_command(app)
every_page = pytest.mark.parametrize(
    "page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES]
)


def _blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page in these languages."""
    found = FENCE.findall(page.read_text(encoding="utf-8"))
    return [text for language, text in found if language in languages]


def _prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def _flags(command: click.Command) -> set[str]:
    return {"--help"} | {
        flag for option in command.params for flag in (*option.opts, *option.secondary_opts)
    }


def _calls(page: Path) -> Iterator[list[str]]:
    """The words of every call of lampq on a page, in blocks and in running text."""
    lines = "".join(_blocks(page, "sh")).replace("\\\n", " ").splitlines()
    inline = re.findall(r"`(lampq [^`]+)`", _prose(page))
    for line in (*lines, *inline):
        words = shlex.split(line.replace("...", ""), comments=True)
        if words[:1] == ["lampq"]:
            yield words[1:]


@every_page
def test_commands_have_the_flags_that_are_shown(page: Path) -> None:
    for command, *words in _calls(page):
        if command == "COMMAND" or command.startswith("--"):
            continue
        assert command in CLI.commands, f"there is no lampq {command}"
        known = _flags(CLI.commands[command])
        shown = {word.split("=")[0] for word in words if word.startswith("--")}
        assert shown <= known, f"lampq {command} has no {shown - known}"


@every_page
def test_flags_in_running_text_exist(page: Path) -> None:
    known = set().union(*(_flags(command) for command in CLI.commands.values()))
    shown = set(re.findall(r"(?<=`)--[a-z][a-z-]*", _prose(page)))
    assert shown <= known


@pytest.mark.parametrize("command", sorted(CLI.commands))
def test_every_command_and_every_flag_is_documented(command: str) -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert f"| `lampq {command}` |" in (ROOT / "docs/commands.md").read_text(encoding="utf-8")
    options = {f"--{field.name.replace('_', '-')}" for field in fields(RunConfig)}
    for flag in _flags(CLI.commands[command]) - options:
        assert re.search(rf"{flag}\b(?!-)", text), f"{flag} of lampq {command} is nowhere explained"


def test_help_has_no_brackets_that_the_terminal_would_take_for_markup() -> None:
    options = [option for command in CLI.commands.values() for option in command.params]
    helps = [getattr(option, "help", None) or "" for option in options]
    assert sum(map(bool, helps)) > 50
    assert [text for text in helps if "[" in text] == []


@every_page
def test_python_compiles_and_its_names_of_lampq_exist(page: Path) -> None:
    for block in _blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lampq"):
                module = importlib.import_module(str(node.module))
                assert [name.name for name in node.names if not hasattr(module, name.name)] == []
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "lampq":
                assert hasattr(lampq, node.attr), f"there is no lampq.{node.attr}"


@every_page
def test_options_of_quantize_in_python_exist(page: Path) -> None:
    known = {*inspect.signature(lampq.quantize).parameters, *(f.name for f in fields(RunConfig))}
    inline = re.findall(r"`(lampq\.quantize\([^`]*\))`", _prose(page).replace("...", "()"))
    for block in (*_blocks(page, "python"), *inline):
        for node in ast.walk(ast.parse(block.replace("(())", "()"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "lampq.quantize":
                assert {word.arg for word in node.keywords} <= known


@every_page
def test_toml_and_json_can_be_read(page: Path) -> None:
    for block in _blocks(page, "toml"):
        assert tomllib.loads(block)
    for block in _blocks(page, "json"):
        assert json.loads(block)


@every_page
def test_targets_of_make_exist(page: Path) -> None:
    text = "".join(_blocks(page, "sh")) + "".join(re.findall(r"`[^`\n]+`", _prose(page)))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:^|`)make ([a-z]+)", text, re.MULTILINE):
        assert f"\n{target}:" in makefile


def _anchors(page: Path) -> set[str]:
    """The anchors that headings of a page get."""
    titles = re.findall(r"^#+ (.+)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", t).strip().lower()) for t in titles}


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_from_outside_the_site_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", _prose(ROOT / name)):
        path, _, anchor = target.partition("#")
        if path.startswith("http"):
            continue
        assert (ROOT / path).exists(), f"no file {path}"
        assert not anchor or anchor in _anchors(ROOT / path), f"no heading {target}"


def _table_of_defaults() -> dict[str, tuple[str, str]]:
    """Option -> its cells for the presets best and paper."""
    text = (ROOT / "docs/options.md").read_text(encoding="utf-8")
    table = text.split("## Table of defaults")[1].split("## What is wanted")[0]
    found = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            best, paper = cells[2], cells[3]
            for name in re.findall(r"`(\w+)`", cells[0]):
                found[name] = (best, best if paper == "=" else paper)
    return found


def test_the_table_of_defaults_has_every_option_and_no_other() -> None:
    assert sorted(_table_of_defaults()) == sorted(field.name for field in fields(RunConfig))


def _cell(value: object) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    return f"`{value}`" if isinstance(value, str) else f"{value:g}"


@pytest.mark.parametrize("option", [field.name for field in fields(RunConfig)])
def test_the_table_of_defaults_is_that_of_the_code(option: str) -> None:
    cells = _table_of_defaults()[option]
    best = getattr(RunConfig(), option)
    if option in ("choices", "act_choices"):  # not set; the table says what follows from the target
        assert best is None
        return
    for cell, value in zip(cells, (best, PAPER.get(option, best)), strict=True):
        assert cell.split(":")[0] == _cell(value)


def test_the_page_of_the_interface_has_every_public_name() -> None:
    text = (ROOT / "docs/api/index.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^::: lampq\.(\w+)$", text, re.MULTILINE))
    assert "errors" in shown  # the module: all its classes are on the page
    assert set(lampq.__all__) - {"__version__"} - set(vars(lampq.errors)) <= shown


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    for registry in (METHODS, METRICS, FINISHERS):
        monkeypatch.setattr(registry, "_factories", dict(registry._factories))


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The module of the page on plug-ins, importable; the folder that it is in."""
    code = _blocks(ROOT / "docs/plugins.md", "python")
    (tmp_path / "my_plugins.py").write_text("\n".join(code[:3]), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_plugins", raising=False)
    return tmp_path


@pytest.mark.slow
@pytest.mark.usefixtures("registries")
def test_the_plugins_of_the_page_work_from_python(plugins: Path) -> None:
    del plugins
    module = dict(vars(importlib.import_module("my_plugins")))
    use, again = _blocks(ROOT / "docs/plugins.md", "python")[3:]
    exec(use, module)
    exec(again, module)
    result = module["result"]
    assert result.config.method == "sigma"
    assert set(result.sensitivity.details) == {"share"}
    assert result.reconstruction.name == "bias"
    assert METHODS.get("sigma2")().reach == 2.0


@pytest.mark.slow
@pytest.mark.usefixtures("registries")
def test_the_plugins_of_the_page_work_by_entry_point(plugins: Path) -> None:
    (toml,) = _blocks(ROOT / "docs/plugins.md", "toml")
    project = tomllib.loads(toml)["project"]
    info = plugins / "my_plugins-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-plugins\nVersion: 1.0\n")
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups))
    command = next(words for words in _calls(ROOT / "docs/plugins.md") if words[0] == "quantize")
    command[command.index("--out") + 1] = str(plugins / "run")
    with few_bundled(64):
        assert Outcome(*command, "--quiet").code == 0
    report = json.loads((plugins / "run/report.json").read_text(encoding="utf-8"))
    used = {name: report["config"][name] for name in ("method", "metric", "reconstruct")}
    assert used == {"method": "sigma", "metric": "worst", "reconstruct": "bias"}
