from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from test_painter import Stopping

from lampq.data import list_folder, read_folder
from lampq.errors import ConfigError, DataError
from lampq.models import LoadedModel, load_model
from lampq.zero_shot import Synthesis, check_folder, make_folder, read_about, read_made
from lampq.zero_shot.base import Subject
from lampq.zero_shot.canvas import Canvas
from lampq.zero_shot.folder import described, summary
from lampq.zero_shot.painter import batches, joined

SETTINGS = Synthesis(5, "pyramid", 2, 2, 7)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("fashion_vit")


def _make(loaded: LoadedModel, folder: Path, settings: Synthesis = SETTINGS, **more: Any) -> Any:
    return make_folder(loaded, None, loaded.preprocessing, settings, folder, **more)


@pytest.fixture(scope="module")
def made(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "pictures"
    _make(loaded, folder)
    return folder


def _content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_a_folder_has_pictures_labels_a_sheet_and_how_they_were_made(made: Path) -> None:
    assert set(_content(made)) == {
        *(f"images/{n:05d}.png" for n in range(5)),
        "labels.csv",
        "contact_sheet.png",
        "synthesis.json",
    }


def test_it_is_a_data_folder_with_the_very_bytes(loaded: LoadedModel, made: Path) -> None:
    canvas = Canvas(loaded.preprocessing)
    exact = joined(batches(Subject.of(loaded.model, canvas), canvas, SETTINGS), canvas.how)
    samples = read_folder(made, loaded.preprocessing)
    assert torch.equal(samples.images, exact.images)
    assert torch.equal(samples.require_labels(""), exact.require_labels(""))


def test_the_table_has_the_probability_of_each_class(loaded: LoadedModel, made: Path) -> None:
    with (made / "labels.csv").open() as handle:
        rows = list(csv.DictReader(handle))
    samples = read_folder(made, loaded.preprocessing)
    with torch.no_grad():
        whole = loaded.model(samples.inputs(slice(None))).softmax(dim=1)
    for number, row in enumerate(rows):
        assert row["file"] == f"{number:05d}.png"
        expected = float(whole[number, int(row["label"])])
        assert float(row["probability"]) == pytest.approx(expected, abs=1e-3)


def test_the_sheet_shows_the_pictures_enlarged_side_by_side(
    loaded: LoadedModel, made: Path
) -> None:
    sheet = Image.open(made / "contact_sheet.png")
    # 28 pixels are enlarged three times: five pictures of 84, six gaps of 4
    assert sheet.size == (5 * 84 + 6 * 4, 84 + 2 * 4)
    second = sheet.crop((4 + 88, 4, 4 + 88 + 84, 88)).resize((28, 28), Image.Resampling.NEAREST)
    expected = Image.open(made / "images" / "00001.png")
    assert second.tobytes() == expected.tobytes()


def test_how_they_were_made_is_on_record(made: Path) -> None:
    about = read_about(made)
    assert about["synthesis_version"] == 1
    assert about["model"]["name"] == "fashion_vit"
    assert about["settings"] == {
        "images": 5,
        "recipe": "pyramid",
        "steps": 2,
        "batch": 2,
        "seed": 7,
        "precision": "auto",
    }
    assert about["computed_in"] in {"float32", "bfloat16"}
    assert about["recipe"]["steps"] == 2
    assert about["preprocessing"] == {"mean": [0.286], "std": [0.353], "size": 28}
    assert about["plain"] == 2
    assert 0 <= about["accuracy"] <= 100
    assert 0 < about["mean_probability"] < 1
    assert about["seconds"] > 0


def test_an_interrupted_folder_goes_on_to_the_same_files(
    loaded: LoadedModel, made: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "pictures"
    with pytest.raises(KeyboardInterrupt):
        _make(loaded, folder, progress=Stopping(3))
    with pytest.raises(DataError, match=r"neither labels\.csv"):
        list_folder(folder)
    with pytest.raises(DataError, match="no finished synthesis"):
        read_about(folder)
    check_folder(folder, resume=True)
    _make(loaded, folder)
    expected, found = _content(made), _content(folder)
    for content in (expected, found):
        about = json.loads(content.pop("synthesis.json"))
        assert about.pop("seconds") > 0
        content["about"] = json.dumps(about).encode()
    assert found == expected


def test_a_finished_folder_is_left_as_it_is(loaded: LoadedModel, made: Path) -> None:
    before = _content(made)
    assert _make(loaded, made, progress=Stopping(0)) == read_about(made)
    assert _content(made) == before


@pytest.mark.parametrize(
    "change", [{"seed": 8}, {"images": 6}, {"recipe": "psaq"}, {"steps": 3}], ids=str
)
def test_pictures_of_other_options_are_refused(
    loaded: LoadedModel, made: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    other = replace(SETTINGS, **change)
    with pytest.raises(ConfigError, match="were made with other options"):
        _make(loaded, made, other)
    begun = tmp_path / "begun"
    with pytest.raises(KeyboardInterrupt):
        _make(loaded, begun, progress=Stopping(1))
    with pytest.raises(ConfigError, match="had other options"):
        _make(loaded, begun, other)


def test_nothing_is_written_over(loaded: LoadedModel, made: Path, tmp_path: Path) -> None:
    check_folder(tmp_path / "new", resume=False)
    with pytest.raises(ConfigError, match="finished pictures: choose another --out"):
        check_folder(made, resume=False)
    with pytest.raises(ConfigError, match="finished pictures: there is nothing to resume"):
        check_folder(made, resume=True)
    with pytest.raises(ConfigError, match="no interrupted synthesis to resume"):
        check_folder(tmp_path / "new", resume=True)
    with pytest.raises(ConfigError, match="is a file, not a folder"):
        check_folder(made / "labels.csv", resume=False)
    (tmp_path / "mine" / "images").mkdir(parents=True)
    with pytest.raises(ConfigError, match="already holds pictures"):
        check_folder(tmp_path / "mine", resume=False)
    with pytest.raises(KeyboardInterrupt):
        _make(loaded, tmp_path / "begun", progress=Stopping(1))
    with pytest.raises(ConfigError, match="continue it with --resume"):
        check_folder(tmp_path / "begun", resume=False)


def test_pictures_are_read_as_they_are_whatever_the_crop(loaded: LoadedModel, made: Path) -> None:
    cropped = replace(loaded.preprocessing, crop_pct=0.5)
    whole = read_made(made, loaded.source, loaded.preprocessing)
    assert torch.equal(read_made(made, loaded.source, cropped).images, whole.images)
    assert len(read_made(made, loaded.source, cropped, limit=2)) == 2


def test_pictures_of_another_model_are_refused(made: Path) -> None:
    other = load_model("fashion_swin")
    with pytest.raises(DataError, match="made for the model 'fashion_vit', not for 'fashion_swin'"):
        read_made(made, other.source, other.preprocessing)


def test_a_newer_record_is_refused(made: Path, tmp_path: Path) -> None:
    content = {**read_about(made), "synthesis_version": 2}
    (tmp_path / "synthesis.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="has version 2, this lampq reads version 1"):
        read_about(tmp_path)
    (tmp_path / "synthesis.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        read_about(tmp_path)


def test_pictures_of_no_class_have_no_accuracy(loaded: LoadedModel) -> None:
    canvas = Canvas(loaded.preprocessing)
    made = batches(Subject.of(loaded.model, canvas), canvas, Synthesis(2, "pyramid", 1, 1))
    found = summary(made[1:])
    assert (found["plain"], found["accuracy"], found["mean_probability"]) == (1, None, None)
    about = {**found, "settings": {"images": 1, "recipe": "pyramid"}}
    assert described(about) == "1 plain pictures by pyramid"
