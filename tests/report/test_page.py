"""The page, in headless Chromium where there is one."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome, few_bundled

from lampq.allocate import allocate_ilp
from lampq.artifact.checkpoint import read_header
from lampq.report import plan_json
from lampq.report.content import RunFiles
from lampq.report.folder import read_run
from lampq.report.frontier import cost_table
from lampq.report.page import SCRIPTS, asset, digest, embedded, render
from lampq.runfolder import read_plan
from lampq.types import Budget, CostTable, LayerBits

QUICK = [
    *("--method", "minmax", "--choices", "3,4", "--bits", "3.5", "--quiet"),
    *("--images", "32", "--fit-images", "8", "--metric-images", "8", "--score-images", "8"),
    *("--exchanges", "3", "--patience", "1"),
]
CHROMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>\u2028&\"'"


@pytest.fixture(scope="module", autouse=True)
def few_pictures() -> Iterator[None]:
    """The bundled pictures, but only 40 of each split."""
    with few_bundled(40):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the bundled model with the choices 3 and 4."""
    out = tmp_path_factory.mktemp("page") / "run"
    assert Outcome("quantize", "--out", out, *QUICK).code == 0
    return out


@pytest.fixture(scope="module")
def run(folder: Path) -> RunFiles:
    return read_run(folder)


@pytest.fixture(scope="module")
def costs(folder: Path, run: RunFiles) -> CostTable:
    layers = [spec for spec, _ in read_header(folder / "model.safetensors").layers()]
    return cost_table(layers, json.loads((folder / "sensitivity.json").read_text()))


# ---- without a browser ----


def test_the_page_of_a_run_is_small_and_asks_for_nothing(folder: Path) -> None:
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert len(page.encode()) < 3_000_000
    without = page.replace(asset("LICENSE"), "")
    assert set(re.findall(r"(?:src|href)=\"([^#\"][^\"]*)", without)) == set()
    assert "sourceMappingURL" not in page
    assert "default-src 'none'" in page


def test_the_page_holds_the_licence_of_its_library(folder: Path) -> None:
    assert asset("LICENSE") in (folder / "report.html").read_text(encoding="utf-8")
    assert asset("LICENSE").count("Permission is hereby granted, free of charge") == 2


def test_the_policy_allows_the_scripts_of_the_page_and_no_other(run: RunFiles) -> None:
    page = render(run)
    allowed = re.search(r"script-src ([^;]*);", page)
    assert allowed is not None
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert allowed[1].split() == [digest(text) for text in scripts]
    assert scripts[-1] == "\n".join(asset(name) for name in SCRIPTS)


def test_embedded_json_reads_back_and_cannot_end_its_script() -> None:
    text = embedded({"name": HOSTILE})
    assert json.loads(text) == {"name": HOSTILE}
    assert not set(text) & set("<>&\u2028\u2029")


def test_the_page_is_made_again_from_the_files_of_its_folder(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "report.html").unlink()
    found = Outcome("report", copy)
    assert (found.code, found.out.split()) == (0, ["report", str(copy / "report.html")])
    assert (copy / "report.html").read_bytes() == (folder / "report.html").read_bytes()


@pytest.mark.parametrize("theme", [":root {", ':root[data-theme="dark"] {'], ids=["light", "dark"])
def test_widths_differ_in_lightness_for_those_who_see_no_colours(theme: str) -> None:
    block = asset("page.css").split(theme)[1].split("}")[0]
    colours = dict(re.findall(r"--w(\d+): #(\w{6})", block))
    light = [_luminance(colours[str(bits)]) for bits in range(1, 11)]
    falling = light[0] > light[-1]
    steps = [(a + 0.05) / (b + 0.05) for a, b in pairwise(light)]
    assert all((ratio if falling else 1 / ratio) > 1.15 for ratio in steps)


def _luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


# ---- in a browser ----


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    chrome = next(filter(None, map(shutil.which, CHROMES)), None)
    driver = shutil.which("chromedriver")
    if chrome is None or driver is None:
        pytest.skip("no Chromium with its chromedriver on this machine")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = chrome
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    opened.downloads = tmp_path_factory.mktemp("downloads")
    folder = {"behavior": "allow", "downloadPath": str(opened.downloads)}
    opened.execute_cdp_cmd("Browser.setDownloadBehavior", folder)
    opened.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    yield opened
    opened.quit()


class Page:
    """An open page, as a test asks it."""

    def __init__(self, browser: Any, path: Path, *, dark: bool = False, width: int = 1280) -> None:
        self.browser = browser
        self.messages: list[str] = []
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._command("Emulation.setEmulatedMedia", features=[theme])
        size = {"width": width, "height": 850, "deviceScaleFactor": 1, "mobile": width < 500}
        self._command("Emulation.setDeviceMetricsOverride", **size)
        browser.get(path.as_uri())
        self.wait("return document.documentElement.dataset.painted")

    def _command(self, name: str, **arguments: Any) -> Any:
        return self.browser.execute_cdp_cmd(name, arguments)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(script, *arguments)

    def wait(self, script: str, seconds: float = 60) -> Any:
        end = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < end, f"waited in vain for {script}; {self.complaints()}"
            time.sleep(0.05)
        return found

    def complaints(self) -> list[str]:
        """Everything on the console since the page was opened, errors and warnings."""
        self.messages += [entry["message"] for entry in self.browser.get_log("browser")]
        return self.messages

    def element(self, selector: str) -> Any:
        return self.browser.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        text: str = self.element(selector).text
        return text

    def press(self, *keys: str) -> None:
        """Keys for whatever has the focus."""
        for key in keys:
            self.browser.switch_to.active_element.send_keys(key)

    def focused(self) -> str:
        """What has the focus: its id, or its accessible name."""
        script = "const e = document.activeElement; return e.id || e.ariaLabel || e.value"
        found: str = self.run(script)
        return found

    def widths(self) -> dict[str, tuple[int, int]]:
        """Weight and activation bits of every layer on the map."""
        labels = self.run(
            "return [...document.querySelectorAll('.cell[aria-label]')].map(c => c.ariaLabel)"
        )
        found = {}
        for label in labels:
            bits = re.fullmatch(r"(.+?): (\d) bits weight, (\d) bits input.*", label)
            if bits is not None:
                found[bits[1]] = (int(bits[2]), int(bits[3]))
        return found


def searched(run: RunFiles, widths: dict[str, tuple[int, int]]) -> dict[str, LayerBits]:
    names = run.report["plan"]["layers"]
    return {name: LayerBits(*bits) for name, bits in widths.items() if name in names}


@pytest.fixture
def page(browser: Any, folder: Path) -> Page:
    return Page(browser, folder / "report.html")


def test_the_page_loads_without_a_word_on_the_console_and_without_requests(page: Page) -> None:
    assert page.complaints() == []
    assert page.run("return performance.getEntriesByType('resource').length") == 0
    assert page.run("return Object.values(Chart.instances).length") >= 6


def test_the_page_can_be_used_within_a_second(browser: Any, folder: Path) -> None:
    # processor time of the page's thread, so that other work on the machine does not count
    page = Page(browser, folder / "report.html")
    values = page._command("Performance.getMetrics")["metrics"]
    seconds = {value["name"]: value["value"] for value in values}
    assert 0 < seconds["TaskDuration"] < 1


def test_the_map_shows_the_plan_of_the_run(page: Page, folder: Path, run: RunFiles) -> None:
    shown = page.widths()
    assert searched(run, shown) == read_plan(folder / "plan.json")
    assert {spec.name: (b.weight, b.activation) for spec, b in run.layers} == shown


def test_the_slider_ends_at_the_widest_budget(page: Page) -> None:
    assert page.run("return document.getElementById('budget').max") == "8"
    assert page.text("#budget-end") == "8 bits"


def test_the_headline_has_accuracy_and_size(page: Page, run: RunFiles) -> None:
    cards = page.text("#cards")
    assert f"{run.report['scores']['mixed']['top1']:.2f} %" in cards
    assert f"{run.report['files']['model.safetensors'] / 1e6:.3f} MB" in cards
    for model in ("uniform", "fp32"):
        assert f"{run.report['scores'][model]['top1']:.2f}" in cards
    assert "not measured" in cards


@pytest.mark.parametrize("steps", [1, -4])
def test_the_map_follows_the_slider(
    page: Page, run: RunFiles, costs: CostTable, steps: int
) -> None:
    slider = page.element("#budget")
    assert float(slider.get_attribute("value")) == 3.5
    for _ in range(abs(steps)):
        slider.send_keys("\ue014" if steps > 0 else "\ue012")  # arrow right, arrow left
    budget = Budget(3.5 + steps / 10)
    assert float(slider.get_attribute("value")) == pytest.approx(budget.mean_bits)
    assert slider.get_attribute("aria-valuetext").startswith(f"{budget.mean_bits:.1f} bits")
    plan = searched(run, page.widths())
    best = allocate_ilp(costs, budget)
    columns = [costs.choices.index(plan[layer.name]) for layer in costs.layers]
    total = sum(costs.cost[row, column] for row, column in enumerate(columns))
    assert total == pytest.approx(best.objective)
    assert page.run("return document.querySelector('input[name=source]:checked').value") == "budget"


def test_a_budget_outside_the_choices_is_refused_or_explained(
    page: Page, run: RunFiles, costs: CostTable
) -> None:
    slider = page.element("#budget")
    slider.send_keys("\ue011")  # home
    assert "no plan below 3 bits" in page.text("#budget-note")
    assert searched(run, page.widths()) == {}
    assert not page.element("#download").is_enabled()
    slider.send_keys("\ue010")  # end
    assert "Above 4 bits the plan does not change" in page.text("#budget-note")
    # nothing is in short supply: every layer has its own cheapest width
    cheapest = [costs.choices[column] for column in costs.cost.argmin(axis=1)]
    assert list(searched(run, page.widths()).values()) == cheapest
    assert page.element("#download").is_enabled()


def test_the_downloaded_plan_is_the_shown_one_and_is_taken_back(
    page: Page, run: RunFiles, tmp_path: Path
) -> None:
    page.element("#budget").send_keys("\ue012" * 2)
    shown = searched(run, page.widths())
    path = page.browser.downloads / "plan.json"
    path.unlink(missing_ok=True)
    page.element("#download").click()
    end = time.monotonic() + 30
    while not path.is_file() and time.monotonic() < end:
        time.sleep(0.05)
    assert read_plan(path) == shown
    again = Outcome("quantize", "--out", tmp_path / "again", "--plan", path, *QUICK)
    assert again.code == 0
    content = json.loads((tmp_path / "again" / "plan.json").read_text())
    assert content == json.loads(path.read_text())
    given = Page(page.browser, tmp_path / "again" / "report.html")
    assert searched(run, given.widths()) == shown
    assert "plan was given" in given.text("#sensitivity-body")
    assert given.complaints() == []


def test_everything_is_reached_by_the_tab_key(page: Page) -> None:
    reached = []
    for _ in range(60):
        page.press("\ue004")
        reached.append(page.focused())
        ring = page.run(
            "const e = document.activeElement, s = getComputedStyle(e.matches('[type=radio]') "
            "? e.parentElement : e); return s.outlineStyle + ' ' + s.outlineWidth"
        )
        assert ring == "solid 3px", reached[-1]
        if reached[-1] == "width":
            break
    wanted = ["theme", "run", "budget", "download", "previous", "pick", "next", "width"]
    assert [name for name in reached if name in wanted] == wanted
    # of the map only the chosen cell, between slider and download
    inside = reached[reached.index("budget") + 1 : reached.index("download")]
    assert [name.split(":")[0] for name in inside if ":" in name] == ["blocks.0.attn.qkv"]


def test_arrow_keys_walk_through_the_map_and_enter_chooses(page: Page) -> None:
    page.run("document.querySelector('.cell[tabindex=\"0\"]').focus()")
    page.press("\ue014", "\ue015")  # right: next block; down: next role
    assert page.focused().startswith("blocks.1.attn.proj:")
    page.press("\ue007")
    assert page.run("return document.getElementById('pick').selectedOptions[0].text") == (
        "blocks.1.attn.proj"
    )
    assert "blocks.1.attn.proj" in page.element("#chart-weights").get_attribute("aria-label")
    assert page.text("#layer-facts").splitlines()[1] == "proj"
    page.press("\ue011", "\ue010")  # home, end
    assert page.focused().startswith("head:")


def test_a_range_per_token_is_named_instead_of_one_grid(
    browser: Any, run: RunFiles, tmp_path: Path
) -> None:
    histograms = json.loads(json.dumps(run.histograms))
    entry = histograms["layers"]["blocks.0.attn.proj"]["input"]
    levels = {"first": 0.0, "step": 1.0, "count": 8}
    entry.update(kind="token", bits=3, unit="step", levels=levels)
    path = tmp_path / "token.html"
    path.write_text(render(replace(run, histograms=histograms)), encoding="utf-8")
    page = Page(browser, path)
    page.element("#next").click()
    note = "return document.getElementById('chart-inputs').closest('figure').innerText"
    assert "8 levels (token, 3 bits). One range per token, found at run time." in page.run(note)
    axis = "return Chart.getChart('chart-inputs').options.scales.x.title.text"
    assert page.run(axis) == "in steps of the grid of each token"
    assert page.complaints() == []


def test_the_histogram_of_a_layer_is_that_of_the_file(page: Page, run: RunFiles) -> None:
    page.element("#next").click()
    name = page.run("return document.getElementById('pick').selectedOptions[0].text")
    assert name == "blocks.0.attn.proj"
    assert run.histograms is not None
    entry = run.histograms["layers"][name]["weight"]
    drawn = page.run("return Chart.getChart('chart-weights').data.datasets[1].data.map(p => p.y)")
    total = sum(entry["counts"]) + entry["below"] + entry["above"]
    assert drawn == pytest.approx([0, *(100 * count / total for count in entry["counts"]), 0])
    lines = page.run("return Chart.getChart('chart-weights').data.datasets[0].data.length / 3")
    assert lines == 2 ** run.report["plan"]["layers"][name]["weight"]


def test_the_theme_follows_the_system_and_the_button(browser: Any, folder: Path) -> None:
    page = Page(browser, folder / "report.html", dark=True)
    ground = "return getComputedStyle(document.body).backgroundColor"
    dark = page.run(ground)
    page.element("#theme").click()
    light = page.run(ground)
    assert (dark, light) == ("rgb(15, 19, 24)", "rgb(246, 247, 249)")
    page.wait("return document.documentElement.dataset.theme === 'light'")
    assert page.complaints() == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_texts_have_enough_contrast(browser: Any, folder: Path, dark: bool) -> None:
    page = Page(browser, folder / "report.html", dark=dark)
    # every width once, whatever the plan is
    page.run(
        "RUN.plans.run.widths.forEach((w, i) => { w[0] = w[1] = 1 + i % 10; }); changeTheme("
        "document.documentElement.dataset.theme)"
    )
    pairs = page.run(
        "const seen = (e) => { while (e && getComputedStyle(e).backgroundColor === "
        "'rgba(0, 0, 0, 0)') e = e.parentElement; return getComputedStyle(e).backgroundColor; };"
        "return [...document.querySelectorAll('.cell[aria-label], p, button, a, td, th, dt, dd, "
        "h2, figcaption, summary')].filter(e => e.offsetParent && e.textContent).map(e => "
        "[getComputedStyle(e).color, seen(e), e.textContent])"
    )
    assert len(pairs) > 60
    for front, back, text in pairs:
        one, other = (
            _luminance("".join(f"{int(p):02x}" for p in re.findall(r"\d+", c)[:3]))
            for c in (front, back)
        )
        ratio = (max(one, other) + 0.05) / (min(one, other) + 0.05)
        assert ratio >= 4.5, (text, front, back)


def test_a_phone_shows_blocks_as_rows_and_nothing_runs_off(browser: Any, folder: Path) -> None:
    page = Page(browser, folder / "report.html", width=390)
    assert page.run("return document.documentElement.scrollWidth") == 390
    boxes = page.run(
        "return ['blocks.0.attn.qkv', 'blocks.0.attn.proj', 'blocks.1.attn.qkv'].map(n => { const "
        "b = document.querySelector(`.cell[aria-label^='${n}:']`).getBoundingClientRect(); "
        "return [b.left, b.top, b.width, b.height]; })"
    )
    qkv, proj, below = boxes
    assert (qkv[1], qkv[0]) == (proj[1], below[0])
    assert proj[0] > qkv[0]
    assert below[1] > qkv[1]
    # large enough for a finger
    assert min(qkv[2:]) >= 40
    assert page.complaints() == []


def test_controls_have_names_and_ids_are_unique(page: Page) -> None:
    assert page.run("const i = [...document.querySelectorAll('[id]')].map(e => e.id);"
                    "return i.length === new Set(i).size")  # fmt: skip
    nameless = page.run(
        "return [...document.querySelectorAll('button, input, select, canvas')].filter(e => "
        "!(e.ariaLabel || e.textContent.trim() || (e.labels && e.labels.length))).length"
    )
    assert nameless == 0


def test_made_pictures_are_called_made(browser: Any, run: RunFiles, tmp_path: Path) -> None:
    data = {"calibration_images": 64, "synthesis": {"settings": {"recipe": "psaq"}}}
    path = tmp_path / "made.html"
    path.write_text(render(replace(run, report={**run.report, "data": data})), encoding="utf-8")
    page = Page(browser, path)
    assert "64, made from the model alone (psaq)" in page.text("#about-body")


def test_hostile_names_are_shown_and_not_run(browser: Any, run: RunFiles, tmp_path: Path) -> None:
    text = json.dumps({**run.report, "notices": [HOSTILE], "data": {"calib": HOSTILE}})
    victim = run.layers[1][0].name
    layers = json.dumps(HOSTILE)[1:-1]
    report = json.loads(text.replace(victim, layers))
    report["model"]["name"] = HOSTILE
    assert run.sensitivity is not None
    assert run.histograms is not None
    files = RunFiles(
        report=report,
        layers=[
            (type(spec)(HOSTILE, spec.role, spec.block, spec.n_params), bits)
            if spec.name == victim
            else (spec, bits)
            for spec, bits in run.layers
        ],
        sensitivity=json.loads(json.dumps(run.sensitivity).replace(victim, layers)),
        histograms=json.loads(json.dumps(run.histograms).replace(victim, layers)),
    )
    path = tmp_path / "hostile.html"
    path.write_text(render(files), encoding="utf-8")
    page = Page(browser, path)
    for details in page.browser.find_elements("css selector", "summary"):
        details.click()
    assert page.run("return window.hacked") is None
    assert page.run("return document.images.length") == 0
    assert page.run("return document.querySelector('.notice').textContent") == HOSTILE
    assert HOSTILE in page.run("return document.title")
    names = page.run("return [...document.getElementById('pick').options].map(o => o.text)")
    assert HOSTILE in names or HOSTILE.strip() in [name.strip() for name in names]
    assert page.complaints() == []


def test_a_run_of_a_swin_shows_its_stages_and_reductions(browser: Any, tmp_path: Path) -> None:
    out = tmp_path / "swin"
    options = [*QUICK, "--metric", "fisher", "--probe-images", "8", "--mu", "0.25"]
    found = Outcome("quantize", "fashion_swin", "--out", out, *options)
    assert found.code == 0
    page = Page(browser, out / "report.html")
    titles = page.run(
        "return [...document.querySelectorAll('.stage .title')].map(e => e.textContent)"
    )
    assert titles == ["", "stage 1", "stage 2"]
    assert page.widths()["layers.1.downsample.reduction"] == (8, 8)
    details = json.loads((out / "sensitivity.json").read_text())["details"]
    drawn = {
        key: page.run(f"return Chart.getChart('chart-{key}').data.datasets[0].data.map(p => p.y)")
        for key in ("before", "after")
    }
    traces = [v for name, v in details["fisher_trace"].items() if name.endswith("qkv")]
    assert drawn["before"] == pytest.approx(traces)
    assert drawn["after"] == pytest.approx([t * details["role_scale"]["qkv"] for t in traces])
    probed = page.run(
        "return Chart.getChart('chart-probes').data.datasets.flatMap(d => d.data.map(p => p.y))"
    )
    assert sorted(probed) == pytest.approx(sorted(details["probe"]["drop"].values()))
    assert page.complaints() == []


def test_plans_of_the_page_are_written_as_a_run_writes_them(page: Page, run: RunFiles) -> None:
    written = page.run("return planFile(shownPlan())")
    plan = run.plan(run.report["plan"])
    assert written == plan_json(plan)
