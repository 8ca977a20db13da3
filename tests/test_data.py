from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lampq.data import Preprocessing, Samples, gather, list_folder, read_folder, read_picture
from lampq.errors import DataError
from lampq.typed import preprocessing_with

TINY = Preprocessing(mean=(0.5,) * 3, std=(0.25,) * 3, crop_pct=1.0, size=8)
GREY = Preprocessing(mean=(0.5,), std=(0.25,), crop_pct=1.0, size=8)


def _paint(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (8, 8)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def _write_table(folder: Path, rows: list[list[str]]) -> Path:
    table = folder / "labels.csv"
    with table.open("w", newline="", encoding="utf-8") as handle:
        csv.writer(handle).writerows(rows)
    return table


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """Three pictures and a labels.csv with one more column than needed."""
    for i in range(3):
        _paint(tmp_path / "images" / f"{i}.png", (i * 10, 0, 0))
    rows = [["file", "label", "name"]] + [[f"{i}.png", str(i + 5), "x"] for i in range(3)]
    _write_table(tmp_path, rows)
    return tmp_path


@pytest.fixture
def by_class(tmp_path: Path) -> Path:
    """Two class folders with three pictures and one file that is no picture."""
    _paint(tmp_path / "cat" / "b.png", (0, 1, 0))
    _paint(tmp_path / "cat" / "a.PNG", (0, 2, 0))
    _paint(tmp_path / "ant" / "c.jpeg", (0, 3, 0))
    (tmp_path / "ant" / "notes.txt").write_text("no picture", encoding="utf-8")
    return tmp_path


@pytest.fixture
def numbered() -> Samples:
    """Forty samples whose picture holds their own number, which is also their label."""
    numbers = torch.arange(40)
    return Samples(numbers.float().view(-1, 1, 1, 1).expand(-1, 3, 2, 2).clone(), numbers)


def test_labels_csv_gives_pictures_and_labels_in_its_order(listed: Path) -> None:
    assert list_folder(listed) == [(listed / "images" / f"{i}.png", i + 5) for i in range(3)]


def test_class_folders_are_numbered_in_alphabetical_order(by_class: Path) -> None:
    found = [
        (path.relative_to(by_class).as_posix(), label) for path, label in list_folder(by_class)
    ]
    assert found == [("ant/c.jpeg", 0), ("cat/a.PNG", 1), ("cat/b.png", 1)]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no folder '.*nowhere'"):
        list_folder(tmp_path / "nowhere")


def test_a_folder_in_neither_layout_is_named_with_both_layouts(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    with pytest.raises(DataError, match=r"neither labels\.csv .* nor one folder .*\.jpg"):
        list_folder(tmp_path)


def test_a_missing_column_is_refused_with_the_columns_found(listed: Path) -> None:
    _write_table(listed, [["file", "class"], ["0.png", "5"]])
    with pytest.raises(DataError, match="columns file and label, found file, class"):
        list_folder(listed)


def test_a_table_without_rows_is_refused(listed: Path) -> None:
    _write_table(listed, [["file", "label"]])
    with pytest.raises(DataError, match="found no rows"):
        list_folder(listed)


@pytest.mark.parametrize("label", ["cat", "-1", "1.5", "", "²"])
def test_a_label_that_is_no_class_index_is_refused_by_line(listed: Path, label: str) -> None:
    _write_table(listed, [["file", "label"], ["0.png", "5"], ["1.png", label]])
    with pytest.raises(DataError, match=f"line 3: label '{label}' is no class index"):
        list_folder(listed)


def test_a_row_without_its_label_is_refused_by_line(listed: Path) -> None:
    _write_table(listed, [["file", "label"], ["0.png", "5"], ["1.png"]])
    with pytest.raises(DataError, match="line 3"):
        list_folder(listed)


def test_a_row_without_its_file_is_refused_by_line(listed: Path) -> None:
    _write_table(listed, [["label", "file"], ["5", "0.png"], ["6"]])
    with pytest.raises(DataError, match="line 3"):
        list_folder(listed)


def test_a_table_saved_with_a_byte_order_mark_is_read(listed: Path) -> None:
    table = listed / "labels.csv"
    table.write_text("file,label\n0.png,5\n", encoding="utf-8-sig")
    assert list_folder(listed) == [(listed / "images" / "0.png", 5)]


def test_a_listed_picture_that_does_not_exist_is_named_by_line(listed: Path) -> None:
    _write_table(listed, [["file", "label"], ["gone.png", "5"]])
    with pytest.raises(DataError, match=r"line 2: no picture '.*gone\.png'"):
        list_folder(listed)


@pytest.mark.parametrize("damage", ["text", "empty", "truncated"])
def test_a_corrupt_picture_is_named(listed: Path, damage: str) -> None:
    path = listed / "images" / "1.png"
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    whole = path.read_bytes()
    path.write_bytes(
        {"text": b"hello", "empty": b"", "truncated": whole[: len(whole) // 2]}[damage]
    )
    with pytest.raises(DataError, match=r"cannot read picture '.*1\.png'"):
        read_folder(listed, TINY)


def test_a_picture_keeps_its_bytes_when_it_has_the_right_size(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    read = read_picture(tmp_path / "a.png", TINY)
    assert read.dtype == torch.uint8
    assert torch.equal(read, torch.from_numpy(pixels).permute(2, 0, 1))


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1"])
def test_a_picture_of_another_mode_becomes_three_channels(tmp_path: Path, mode: str) -> None:
    Image.new("L", (8, 8), 255).convert(mode).save(tmp_path / "a.png")
    read = read_picture(tmp_path / "a.png", TINY)
    assert torch.equal(read, torch.full((3, 8, 8), 255, dtype=torch.uint8))


def test_one_mean_reads_a_colour_picture_as_grey(tmp_path: Path) -> None:
    _paint(tmp_path / "a.png", (255, 0, 0))
    read = read_picture(tmp_path / "a.png", GREY)
    # ITU-R 601: 0.299 of the red
    assert torch.equal(read, torch.full((1, 8, 8), 76, dtype=torch.uint8))


@pytest.mark.parametrize("size", [(16, 8), (8, 16)], ids=["wide", "tall"])
def test_the_centre_of_a_long_picture_is_kept(tmp_path: Path, size: tuple[int, int]) -> None:
    picture = Image.new("RGB", size, (255, 255, 255))
    left, top = (size[0] - 8) // 2, (size[1] - 8) // 2
    picture.paste((10, 20, 30), (left, top, left + 8, top + 8))
    picture.save(tmp_path / "a.png")
    expected = torch.tensor([10, 20, 30], dtype=torch.uint8).view(3, 1, 1).expand(3, 8, 8)
    assert torch.equal(read_picture(tmp_path / "a.png", TINY), expected)


def test_the_crop_fraction_cuts_the_border_away(tmp_path: Path) -> None:
    picture = Image.new("RGB", (16, 16), (255, 255, 255))
    picture.paste((10, 20, 30), (4, 4, 12, 12))
    picture.save(tmp_path / "a.png")
    half = Preprocessing(mean=(0.5,) * 3, std=(0.25,) * 3, crop_pct=0.5, size=8)
    expected = torch.tensor([10, 20, 30], dtype=torch.uint8).view(3, 1, 1).expand(3, 8, 8)
    assert torch.equal(read_picture(tmp_path / "a.png", half), expected)


def test_a_picture_of_the_input_size_is_taken_whole_unless_asked_otherwise(tmp_path: Path) -> None:
    picture = Image.new("RGB", (8, 8), (255, 255, 255))
    picture.paste((10, 20, 30), (2, 2, 6, 6))
    picture.save(tmp_path / "a.png")
    how = Preprocessing(crop_pct=0.5, size=8)
    whole = read_picture(tmp_path / "a.png", how)
    assert torch.equal(whole, read_picture(tmp_path / "a.png", replace(how, crop_pct=1.0)))
    assert whole[:, 0, 0].tolist() == [255, 255, 255]
    again = read_picture(tmp_path / "a.png", replace(how, recrop=True))
    assert again[:, 0, 0].float().mean() < 150


def test_only_a_typed_crop_fraction_crops_again() -> None:
    own = Preprocessing()
    assert not preprocessing_with(own, "0.5", "0.5", None).recrop
    assert preprocessing_with(own, None, None, 0.875).recrop
    assert preprocessing_with(replace(own, recrop=True), None, None, None).recrop


@pytest.mark.parametrize("size", [(5, 5), (300, 7), (7, 300), (224, 224), (1, 1)], ids=str)
def test_every_picture_comes_out_at_the_asked_size(tmp_path: Path, size: tuple[int, int]) -> None:
    _paint(tmp_path / "a.png", (1, 2, 3), size)
    assert read_picture(tmp_path / "a.png", Preprocessing(size=8)).shape == (3, 8, 8)


@pytest.mark.parametrize("size", [(500, 375), (333, 500), (256, 256), (640, 427)], ids=str)
def test_pictures_are_prepared_as_by_the_usual_evaluation_transform(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    from timm.data import create_transform

    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.png")
    transform = create_transform(
        (3, 224, 224), crop_pct=0.875, interpolation="bicubic", mean=(0,) * 3, std=(1,) * 3
    )
    expected = (transform(Image.open(tmp_path / "a.png")) * 255).round()
    assert torch.equal(read_picture(tmp_path / "a.png", Preprocessing()).float(), expected)


def test_a_folder_is_read_with_its_labels(listed: Path) -> None:
    samples = read_folder(listed, TINY)
    assert samples.images.shape == (3, 3, 8, 8)
    assert samples.images[:, 0, 0, 0].tolist() == [0, 10, 20]
    assert samples.require_labels("a test").tolist() == [5, 6, 7]


def test_a_limit_takes_that_many_pictures_in_their_order(listed: Path) -> None:
    labels = read_folder(listed, TINY, limit=2).require_labels("a test").tolist()
    assert len(labels) == 2
    assert labels == sorted(set(labels))


def test_a_limited_folder_depends_on_the_seed_only(listed: Path) -> None:
    first, again = (read_folder(listed, TINY, limit=1, seed=3) for _ in range(2))
    chosen = {int(read_folder(listed, TINY, limit=1, seed=s).images[0, 0, 0, 0]) for s in range(9)}
    assert torch.equal(first.images, again.images)
    assert len(chosen) > 1


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.01])
def test_a_crop_fraction_outside_its_range_is_refused(fraction: float) -> None:
    with pytest.raises(DataError, match=f"got {fraction}"):
        Preprocessing(crop_pct=fraction)


def test_a_deviation_of_zero_is_refused() -> None:
    with pytest.raises(DataError, match="std above zero"):
        Preprocessing(std=(0.0, 1.0, 1.0))


def test_as_many_means_as_deviations_are_needed() -> None:
    with pytest.raises(DataError, match="must match"):
        Preprocessing(mean=(0.5,))


def test_bytes_are_normalised_with_mean_and_deviation() -> None:
    images = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 3, 1, 1)
    samples = Samples(images, None, (0.5, 0.2, 0.0), (0.25, 1.0, 2.0))
    # (0 - 0.5) / 0.25, (0.2 - 0.2) / 1, (1 - 0) / 2
    torch.testing.assert_close(samples.inputs(slice(None)).flatten(), torch.tensor([-2.0, 0, 0.5]))


def test_floats_are_taken_as_they_are(numbered: Samples) -> None:
    assert torch.equal(numbered.inputs(slice(3, 5)), numbered.images[3:5])


def test_bytes_without_mean_and_deviation_are_refused() -> None:
    with pytest.raises(DataError, match="mean"):
        Samples(torch.zeros(2, 1, 4, 4, dtype=torch.uint8)).inputs(slice(None))


@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (3, 4, 4)], ids=["empty", "single"])
def test_images_of_another_shape_are_refused_with_it(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=rf"got \({shape[0]}, "):
        Samples(torch.zeros(shape))


def test_labels_must_be_as_many_as_images() -> None:
    with pytest.raises(DataError, match="4 images but 3 labels"):
        Samples(torch.zeros(4, 1, 2, 2), torch.zeros(3))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_images_that_are_not_finite_are_refused(value: float) -> None:
    images = torch.zeros(2, 1, 2, 2)
    images[1, 0, 1, 1] = value
    with pytest.raises(DataError, match="NaN or infinite"):
        Samples(images)


@pytest.mark.parametrize("size", [1, 7, 40, 100])
def test_batches_give_every_sample_once_in_order(numbered: Samples, size: int) -> None:
    labels = [label for _, label in numbered.batches(size) if label is not None]
    assert torch.cat(labels).tolist() == list(range(40))
    assert max(len(label) for label in labels) <= size


def test_a_subset_is_the_same_for_the_same_seed(numbered: Samples) -> None:
    assert torch.equal(numbered.subset(10, seed=4).images, numbered.subset(10, seed=4).images)


def test_a_subset_differs_between_seeds(numbered: Samples) -> None:
    assert not torch.equal(numbered.subset(10, seed=4).images, numbered.subset(10, seed=5).images)


def test_a_subset_keeps_each_image_with_its_label(numbered: Samples) -> None:
    part = numbered.subset(10, seed=0)
    labels = part.require_labels("a test")
    assert torch.equal(part.images[:, 0, 0, 0].long(), labels)
    assert len(set(labels.tolist())) == 10


def test_a_subset_does_not_touch_the_global_generator(numbered: Samples) -> None:
    before = torch.get_rng_state()
    numbered.subset(10, seed=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_subset_larger_than_the_samples_is_all_of_them(numbered: Samples) -> None:
    assert numbered.subset(41, seed=0) is numbered


def test_missing_labels_are_refused_with_their_purpose() -> None:
    with pytest.raises(DataError, match="the Fisher trace needs labels"):
        Samples(torch.zeros(1, 1, 2, 2)).require_labels("the Fisher trace")


IMAGES = torch.arange(6.0).view(6, 1, 1, 1).expand(6, 3, 2, 2)
LABELS = torch.arange(6)


@pytest.mark.parametrize(
    "items",
    [
        [(IMAGES[:4], LABELS[:4]), (IMAGES[4:], LABELS[4:])],
        [[IMAGES[:1], LABELS[:1]], [IMAGES[1:], LABELS[1:]]],
        list(zip(IMAGES, LABELS, strict=True)),
        [(image, int(label)) for image, label in zip(IMAGES, LABELS, strict=True)],
        Samples(IMAGES, LABELS),
    ],
    ids=["batches", "lists", "pairs", "whole-labels", "samples"],
)
def test_labelled_images_are_gathered(items: list[object]) -> None:
    samples = gather(items)
    assert torch.equal(samples.images, IMAGES)
    assert torch.equal(samples.require_labels("a test"), LABELS)


@pytest.mark.parametrize(
    "items", [[IMAGES[:4], IMAGES[4:]], list(IMAGES), IMAGES], ids=["batches", "single", "tensor"]
)
def test_images_without_labels_are_gathered(items: list[object]) -> None:
    samples = gather(items)
    assert torch.equal(samples.images, IMAGES)
    assert samples.labels is None


def test_a_generator_is_gathered_once() -> None:
    assert len(gather(image for image in IMAGES)) == 6


def test_a_data_loader_is_gathered() -> None:
    dataset = torch.utils.data.TensorDataset(IMAGES, LABELS)
    samples = gather(torch.utils.data.DataLoader(dataset, batch_size=4))
    assert torch.equal(samples.images, IMAGES)
    assert torch.equal(samples.require_labels("a test"), LABELS)


def test_an_empty_iterable_is_refused() -> None:
    with pytest.raises(DataError, match="no samples"):
        gather([])


def test_an_array_that_is_no_tensor_is_refused_by_type() -> None:
    with pytest.raises(DataError, match="must be tensors, got ndarray"):
        gather([np.zeros((3, 2, 2))])


def test_images_of_unequal_sizes_are_refused() -> None:
    with pytest.raises(DataError, match="4, 4"):
        gather([torch.zeros(3, 2, 2), torch.zeros(3, 4, 4)])


def test_labels_for_some_images_only_are_refused() -> None:
    with pytest.raises(DataError, match="2 images but 1 labels"):
        gather([(IMAGES[0], 3), IMAGES[1]])
