"""A folder of images as it comes: formats, broken files, float pixels, duplicates, notes, and the cache on disk."""

import errno
import multiprocessing
import os
import shutil
import struct
import subprocess
import sys
import threading
import unicodedata
import warnings
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from toys import TINY_VIT

from smallvit import MAE, ArmRun, Run, SemiSupervised, data, fingerprint, fit, knn, label_spreading
from smallvit.data import Preprocess
from smallvit.data.decode import read_image
from smallvit.data.images import Rows, joined
from smallvit.launch import launch
from smallvit.launch.plan import data_text
from smallvit.record import WEIGHTS
from smallvit.run import describe, rebuild
from smallvit.train.loop import Training

GENERATOR = np.random.default_rng(0)


def noise(h=6, w=9, c=3):
    return GENERATOR.integers(0, 256, (h, w, c) if c > 1 else (h, w), np.uint8)


def write_class_folders(top, count=6, classes=("cat", "dog"), c=3):
    """Write `count` random PNG files for each class."""
    for name in classes:
        (top / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            Image.fromarray(noise(c=c)).save(top / name / f"{i}.png")
    return top


def write_png_16(path, values, transparent=()):
    """Write a PNG file with 16 bits a channel, which Pillow can only do for gray. `values` is a uint16 array (h, w, c), and
    `transparent` is the color of transparent pixels, if there are any.
    """

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    h, w, c = values.shape
    header = struct.pack(">IIBBBBB", w, h, 16, {1: 0, 2: 4, 3: 2, 4: 6}[c], 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    key = chunk(b"tRNS", struct.pack(f">{len(transparent)}H", *transparent)) if transparent else b""
    content = chunk(b"IHDR", header) + key + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + content)


def write_dicom(path, values, photometric="MONOCHROME2", bits=None, **tags):
    """Write a DICOM file with the given stored values."""
    pydicom = pytest.importorskip("pydicom")
    header = pydicom.dataset.Dataset()
    header.Rows, header.Columns = values.shape[:2]
    header.SamplesPerPixel = 1 if values.ndim == 2 else 3
    if values.ndim == 3:
        header.PlanarConfiguration = 0
    header.PhotometricInterpretation = photometric
    header.BitsAllocated = values.dtype.itemsize * 8
    header.BitsStored = bits or header.BitsAllocated
    header.HighBit = header.BitsStored - 1
    header.PixelRepresentation = int(values.dtype.kind == "i")
    header.SOPClassUID, header.SOPInstanceUID = "1.2.840.10008.5.1.4.1.1.7", "1.2.3"
    header.PixelData = values.tobytes()
    for name, value in tags.items():
        setattr(header, name, value)
    header.file_meta = pydicom.dataset.FileMetaDataset()
    header.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    header.save_as(path, enforce_file_format=True)


def load(top, **options):
    """Load a folder, and return the data set and the texts of all warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dataset = data.folder(str(top), **options)
    assert {warning.filename for warning in caught if "torchvision" not in warning.filename} <= {__file__}
    return dataset, [str(warning.message) for warning in caught if warning.category is UserWarning]


def error_of(top, **options):
    data.folder.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError) as error:
            data.folder(str(top), **options)
    return str(error.value)


# A messy folder


def messy_folder(top):
    """Write one folder with everything that goes wrong in practice. Return a dict from file name to what `folder` should do:
    "read", "ignored", or a part of the reason why the file cannot be used.
    """
    write_class_folders(top, count=4, classes=("cat", "Füchse & Hühner"))
    cat, fox = top / "cat", top / "Füchse & Hühner"
    expected = {str(file.relative_to(top)): "read" for file in top.rglob("*.png")}

    def add(folder, name, outcome, write):
        write(folder / name)
        expected[str((folder / name).relative_to(top))] = outcome

    exif = Image.Exif()
    exif[0x0112] = 6
    photo = Image.fromarray(noise(16, 24))
    add(cat, "exif_turned.jpg", "read", lambda path: photo.save(path, exif=exif))
    add(cat, "print.jpg", "read, a note about CMYK", lambda path: photo.convert("CMYK").save(path))
    add(cat, "palette.png", "read", lambda path: photo.quantize(16).save(path))
    add(cat, "1_bit.png", "read", lambda path: photo.convert("1").save(path))
    add(cat, "gray.bmp", "read", lambda path: photo.convert("L").save(path))
    frames = [Image.fromarray(noise(16, 24)) for _ in range(3)]
    add(cat, "animated.gif", "read", lambda path: frames[0].save(path, save_all=True, append_images=frames[1:]))
    add(cat, "lossy.webp", "read", lambda path: photo.save(path))
    add(cat, "scan.tiff", "read", lambda path: photo.save(path, compression="tiff_lzw"))
    add(fox, "größer_日本.PNG", "read", lambda path: Image.fromarray(noise(30, 20)).save(path))
    add(fox, "copy_of_0.png", "read", lambda path: path.write_bytes((fox / "0.png").read_bytes()))
    add(fox, ".hidden.png", "ignored", lambda path: photo.save(path))
    add(fox, "Thumbs.db", "ignored", lambda path: path.write_bytes(b"thumbs"))
    add(fox, ".DS_Store", "ignored", lambda path: path.write_bytes(b"store"))
    add(fox, "notes.txt", "ignored", lambda path: path.write_text("two foxes"))
    add(fox, "phone.heic", "not read, a note", lambda path: path.write_bytes(b"heic"))
    add(fox, "truncated.jpg", "truncated", lambda path: (photo.save(path), path.write_bytes(path.read_bytes()[:500])))
    add(fox, "page.png", "no known image format", lambda path: path.write_text("<html>404</html>"))
    add(fox, "empty.png", "the file is empty", lambda path: path.write_bytes(b""))
    add(cat, "gray_16.png", "I;16", lambda path: Image.fromarray(noise(8, 8, 1).astype(np.uint16) * 257).save(path))
    add(cat, "color_16.png", "16 bits a channel", partial(write_png_16, values=noise(8, 8).astype(np.uint16) * 257))
    add(cat, "float.tiff", "is F", lambda path: Image.fromarray(noise(8, 8, 1).astype(np.float32) / 255).save(path))
    add(cat, "logo.png", "transparent in places", lambda path: Image.new("RGBA", (8, 8)).save(path))
    (top / ".ipynb_checkpoints").mkdir()
    add(top / ".ipynb_checkpoints", "0-checkpoint.png", "ignored", lambda path: photo.save(path))
    (top / "rare").mkdir()
    for i in range(2):
        add(top / "rare", f"{i}.png", "read", lambda path: Image.fromarray(noise()).save(path))
    add(top, "loose.png", "not read, a note", lambda path: photo.save(path))
    return expected


def test_messy_folder_names_all_broken_files_at_once_and_goes_on_without_them(tmp_path):
    expected = messy_folder(tmp_path)
    broken = {file: reason for file, reason in expected.items() if not reason.startswith(("read", "ignored", "not read"))}
    options = {"size": 8, "channels": 3, "folds": 2}
    message = error_of(tmp_path, **options)
    assert len(broken) == 7 and f"7 of {len(broken) + sum(r.startswith('read') for r in expected.values())} image files" in message
    assert "skip_broken=True" in message
    for file, reason in broken.items():
        lines = [line for line in message.splitlines() if line.strip().startswith(file)]
        assert len(lines) == 1 and reason in lines[0], (file, message)
    dataset, notes = load(tmp_path, **options, skip_broken=True)
    assert set(dataset.train.files) == {file for file, outcome in expected.items() if outcome.startswith("read")}
    assert dataset.skipped == dataset.at_seed(1).skipped == 7
    assert dataset.spec.classes == ("Füchse & Hühner", "cat", "rare")
    assert sorted(note.partition(": ")[2] for note in notes) == [
        "files in the color mode CMYK were converted to RGB: 1",
        "files of these formats are not read: 1 .heic; convert them, for example to PNG",
        "images outside of the class folders are not used: loose.png",
    ]
    same = [dataset.train.files.index(f"Füchse & Hühner/{name}.png") for name in ("0", "copy_of_0")]
    assert dataset.groups[same[0]] == dataset.groups[same[1]] and len(dataset.groups.unique()) == len(dataset.train) - 1
    for file, image in zip(dataset.train.files, dataset.train.images):
        assert Preprocess.from_spec(dataset.spec).pixels(tmp_path / file)[0].equal(image / 255)


def test_float_pixels_read_what_uint8_refuses(tmp_path):
    expected = messy_folder(tmp_path)
    message = error_of(tmp_path, size=8, channels=3, folds=2, pixels="float")
    assert "4 of" in message and not any(name in message for name in ("gray_16", "color_16", "float.tiff"))
    assert 'pixels="float"' in error_of(tmp_path, size=8, channels=3, folds=2) and len(expected) > 25


def test_gray_among_color_and_other_sizes_need_options(tmp_path):
    write_class_folders(tmp_path)
    Image.fromarray(noise(c=1)).save(tmp_path / "cat" / "gray.png")
    message = r"cat/gray.png is (6, 9, 1) (h, w, c) but cat/0.png is (6, 9, 3): set channels="
    assert error_of(tmp_path, folds=2) == message
    Image.fromarray(noise(7, 9)).save(tmp_path / "dog" / "other.png")
    assert error_of(tmp_path, folds=2).endswith("set size= and channels= (2 of 14 images differ from the first one)")
    assert len(data.folder(str(tmp_path), size=6, channels=3, folds=2).train) == 14


def save_pages(file: Path, kinds: list[int]):
    """Write a TIFF file with a page for each of `kinds`, the tag NewSubfileType: 0 a page, 1 a preview, 2 a page, 4 a mask."""
    from PIL.TiffImagePlugin import ImageFileDirectory_v2

    tags = [ImageFileDirectory_v2() for _ in kinds]
    for tag, kind in zip(tags, kinds):
        tag[254] = kind
    pages = [Image.fromarray(noise(8, 8, 1)[..., 0]) for _ in kinds]
    for page, tag in zip(pages, tags):
        page.encoderinfo = {"tiffinfo": tag}
    pages[0].save(file, save_all=True, append_images=pages[1:], tiffinfo=tags[0])


@pytest.mark.parametrize("cache", ["memory", "disk"])
def test_pages_of_tiff_files_that_are_left_out_are_named(cache, tmp_path):
    write_class_folders(tmp_path)
    files = {"stack.tif": [0, 2, 0], "two.tif": [0, 1, 0], "preview.tif": [0, 1], "mask.tiff": [2, 4], "single.tif": [0]}
    for name, kinds in files.items():
        save_pages(tmp_path / "cat" / name, kinds)
    for _ in range(2):  # the second time from the cache
        notes = load(tmp_path, size=8, channels=1, folds=2, cache=cache)[1]
        data.folder.cache_clear()
        assert [note.partition(": ")[2] for note in notes] == ["TIFF files with several pages, of which only the first one is read: 2"]


def test_prediction_says_that_only_the_first_page_is_read(tmp_path):
    preprocess = data.Preprocess.from_spec(data.digits().spec)
    save_pages(tmp_path / "stack.tif", [0, 0])
    save_pages(tmp_path / "single.tif", [0])
    with pytest.warns(UserWarning, match="of TIFF files with several pages, only the first one is read"):
        preprocess(tmp_path / "stack.tif")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        preprocess(tmp_path / "single.tif")


def test_pages_of_tiff_files_that_pillow_cannot_read_are_counted(tmp_path):
    tifffile = pytest.importorskip("tifffile")
    tifffile.imwrite(tmp_path / "deep.tif", noise(2 * 8, 8).reshape(2, 8, 8, 3).astype(np.uint16) * 257, photometric="rgb")
    tifffile.imwrite(tmp_path / "double.tif", noise(8, 8).astype(np.float64) / 255, photometric="rgb")
    names = {"deep.tif": True, "double.tif": False}
    assert {name: read_image(tmp_path / name, None, None, "float").several_pages for name in names} == names


@pytest.mark.parametrize("offset", [9, 2**31])
def test_damaged_later_pages_of_tiff_files_do_not_matter(offset, tmp_path):
    write_class_folders(tmp_path)
    file = tmp_path / "cat" / "damaged.tif"
    Image.fromarray(noise(8, 8)).save(file)
    content = bytearray(file.read_bytes())
    first = int.from_bytes(content[4:8], "little")
    end = first + 2 + 12 * int.from_bytes(content[first : first + 2], "little")
    content[end : end + 4] = offset.to_bytes(4, "little")  # of the next page
    file.write_bytes(content)
    with pytest.warns(UserWarning, match="only the first one is read: 1"):  # Pillow may warn, too
        dataset = data.folder(str(tmp_path), size=8, folds=2)
    assert "cat/damaged.tif" in dataset.train.files


def test_later_page_of_an_unknown_kind_does_not_matter(tmp_path):
    tifffile = pytest.importorskip("tifffile")
    with tifffile.TiffWriter(tmp_path / "x.tif") as file:
        file.write(noise(8, 8)[..., 0], photometric="minisblack")
        file.write(noise(8, 8).astype(np.float64), photometric="rgb")
    assert read_image(tmp_path / "x.tif", None, None).several_pages


def test_gif_gives_its_first_frame_and_cmyk_its_colors(tmp_path):
    write_class_folders(tmp_path)
    red, blue = Image.new("RGB", (9, 6), (255, 0, 0)), Image.new("RGB", (9, 6), (0, 0, 255))
    red.save(tmp_path / "cat" / "x.gif", save_all=True, append_images=[blue])
    blue.convert("CMYK").save(tmp_path / "dog" / "x.jpg", quality=95)
    dataset, notes = load(tmp_path, folds=2)
    first = {file: image for file, image in zip(dataset.train.files, dataset.train.images)}
    assert first["cat/x.gif"][:, 0, 0].tolist() == [255, 0, 0] and len(notes) == 1 and "CMYK were converted to RGB: 1" in notes[0]
    assert (first["dog/x.jpg"][:, 0, 0].int() - torch.tensor([0, 0, 255])).abs().max() < 8


def test_folder_without_a_readable_image_or_class_is_refused(tmp_path):
    write_class_folders(tmp_path, classes=("cat", "dog"))
    (tmp_path / "eel").mkdir()
    assert "no images in" in error_of(tmp_path, folds=2) and "eel" in error_of(tmp_path, folds=2)
    (tmp_path / "eel" / "x.png").write_text("no image")
    assert "no image of class 'eel'" in error_of(tmp_path, folds=2, skip_broken=True)
    for file in tmp_path.rglob("*.png"):
        file.write_bytes(b"")
    assert "no image file can be read" in error_of(tmp_path, folds=2, skip_broken=True)


def test_formats_that_are_not_read_are_counted_in_the_error_for_a_class_and_in_the_note(tmp_path):
    write_class_folders(tmp_path, classes=("cat", "dog"))
    (tmp_path / "eel").mkdir()
    names = ("a.heic", "b.HEIC", "brain.nii.gz", "c.mpo", "d.apng", "e.dib", "table.csv.gz")
    for name in names:
        (tmp_path / "eel" / name).touch()
    (tmp_path / "cat" / "x.avif").touch()
    formats = "formats are not read: 1 .apng, 1 .dib, 2 .heic, 1 .mpo, 1 .nii.gz; convert them, for example to PNG"
    assert f"no images in {tmp_path / 'eel'}; files of these {formats})" in error_of(tmp_path, folds=2)
    Image.fromarray(noise()).save(tmp_path / "eel" / "0.png")
    Image.fromarray(noise()).save(tmp_path / "eel" / "1.png")
    assert formats.replace("1 .dib", "1 .avif, 1 .dib") in load(tmp_path, folds=2)[1][0]


@pytest.mark.parametrize("mode, c", [("1", 1), ("L", 1), ("RGB", 3)])
def test_pnm_files_are_read(mode, c, tmp_path):
    write_class_folders(tmp_path, c=c)
    image = Image.fromarray(noise()).convert(mode)
    image.save(tmp_path / "cat" / "x.pnm", format="PPM")
    dataset, notes = load(tmp_path, folds=2)
    read = dataset.train.images[dataset.train.files.index("cat/x.pnm")]
    assert np.array_equal(read.permute(1, 2, 0).numpy(), np.array(image.convert("L" if c == 1 else mode)).reshape(6, 9, c))
    assert len(dataset.train) == 13 and not notes


@pytest.mark.parametrize("channels", [None, 1])
def test_opaque_palette_with_transparency_data_is_read_without_a_warning(channels, tmp_path):
    write_class_folders(tmp_path, c=3)
    image = Image.fromarray(noise()).convert("P", palette=Image.Palette.ADAPTIVE)
    image.save(tmp_path / "cat" / "x.png", transparency=bytes([255] * 256))
    dataset, notes = load(tmp_path, folds=2, channels=channels)
    read = dataset.train.images[dataset.train.files.index("cat/x.png")]
    assert np.array_equal(read.permute(1, 2, 0).numpy(), np.array(image.convert("L" if channels else "RGB")).reshape(6, 9, -1))
    assert not notes


def test_image_that_pillow_finds_too_large_is_refused_with_advice(tmp_path, monkeypatch):
    Image.new("L", (20, 30)).save(tmp_path / "slide.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match=r"slide\.png .*it has more than 200 pixels; make it smaller, or cut it into several images"):
        read_image(tmp_path / "slide.png", None, None)


def test_name_of_a_data_set_is_the_real_name_of_its_folder(tmp_path, monkeypatch):
    (write_class_folders(tmp_path / "scans") / "cat" / "more").mkdir()
    monkeypatch.chdir(tmp_path / "scans" / "cat")
    assert data.folder("..", folds=2).spec.name == data.folder("../../scans", folds=2).spec.name == "scans"


# Which images are test images


def test_without_train_and_test_folders_one_of_folds_and_test_is_needed(tmp_path):
    top = str(write_class_folders(tmp_path / "plain"))
    message = error_of(top)
    assert "expected either folds=5" in message and "test=0.2 (a" in message and "or both" in message and "got neither" in message
    assert "'cat' has 1; set a larger test=" in error_of(top, folds=3, test=0.2)
    for split in ("train", "test"):
        write_class_folders(tmp_path / "parts" / split)
    for options in ({"folds": 3}, {"test": 0.2}):
        assert "training and test images of its own" in error_of(tmp_path / "parts", **options)
    assert "load" in (message := error_of(tmp_path / "half", **{})) or "no such folder" in message
    (tmp_path / "parts" / "test").rename(tmp_path / "gone")
    assert f"load {tmp_path / 'parts' / 'train'} with folds=" in error_of(tmp_path / "parts")


def test_classes_may_be_called_train_and_test(tmp_path):
    top = write_class_folders(tmp_path, classes=("bus", "test", "train"))
    assert data.folder(str(top), folds=2).spec.classes == ("bus", "test", "train")


@pytest.mark.parametrize(
    "names",
    [("Train", "Test"), ("TRAIN", "TEST"), ("training", "testing"), ("Training", "Testing", "Validation"), ("train", "test", "valid")],
    ids=" ".join,
)
def test_parts_may_have_other_usual_names(tmp_path, names):
    for name in names:
        write_class_folders(tmp_path / name)
    dataset, notes = load(tmp_path)
    assert dataset.spec.classes == ("cat", "dog") and len(dataset.train) == dataset.test.count == 12 and not notes
    assert dataset.train.files[0] == f"{names[0]}/cat/0.png" and dataset.test.open().files[0] == f"{names[1]}/cat/0.png"
    assert (dataset.val is None) == (len(names) == 2)
    assert "has training and test images of its own" in error_of(tmp_path, folds=3)


def test_part_without_class_folders_is_named_with_what_to_do(tmp_path):
    """Many downloads have labelled images in train/<class>, and others, whose class is not known, directly in test."""
    for name in ("train", "val"):
        write_class_folders(tmp_path / name)
    train = f"load {tmp_path / 'train'} with folds= or test="
    assert f"none named test; rename val to test, or {train})" in error_of(tmp_path)
    write_class_folders(tmp_path, classes=("Test",))
    message = error_of(tmp_path)
    assert f"(Test has images, but no class folders; to use train alone, {train})" in message and "none named test" not in message
    (tmp_path / "Test").rename(tmp_path / "class")
    (tmp_path / "val").rename(tmp_path / "test")
    (tmp_path / "train").rename(tmp_path / "other")
    (tmp_path / "class").rename(tmp_path / "train")
    assert f"(train has images, but no class folders; to use test alone, load {tmp_path / 'test'} with" in error_of(tmp_path)


def test_two_folders_for_one_part_are_refused_unless_one_has_no_images(tmp_path):
    for name in ("train", "test", "val", "Validation"):
        write_class_folders(tmp_path / name)
    assert "expected one folder of val images, got Validation and val; join them" in error_of(tmp_path)
    dataset, _ = load(tmp_path, unlabelled="Validation")
    assert len(dataset.unlabelled) == len(dataset.val) == 12
    shutil.rmtree(tmp_path / "Validation" / "cat")
    shutil.rmtree(tmp_path / "Validation" / "dog")
    assert load(tmp_path)[0].val.files[0] == "val/cat/0.png"


def test_classes_may_have_the_names_of_parts_and_subfolders(tmp_path):
    """Only train and test themselves are parts wherever they have no images directly in them."""
    for name, patients in (("invalid", ("p1", "p2")), ("valid", ("p3", "p4")), ("Testing", ("p5", "p6"))):
        write_class_folders(tmp_path / name, count=2, classes=patients)
    dataset, notes = load(tmp_path, folds=2)
    assert dataset.spec.classes == ("Testing", "invalid", "valid") and not notes


def test_parts_under_unusual_names_are_refused_and_equal_subfolders_noted(tmp_path):
    for name in ("Training_set", "TestSet", "other"):
        write_class_folders(tmp_path / name)
    text = "the class folders TestSet, Training_set, other all have the subfolders cat, dog"
    message = error_of(tmp_path, folds=3)
    assert f"({text}, which look like the classes; rename the outer folders to train and test)" in message
    (tmp_path / "Training_set").rename(tmp_path / "site 1")
    dataset, (noted,) = load(tmp_path, folds=3)
    assert dataset.spec.classes == ("TestSet", "other", "site 1")
    assert "all have the subfolders cat, dog; if the subfolders are the classes, move their images to" in noted
    (tmp_path / "other" / "dog").rename(tmp_path / "other" / "eel")
    assert not load(tmp_path, folds=3)[1]


def test_images_beside_the_parts_are_named(tmp_path):
    for name in ("train", "test", "extra", "more"):
        write_class_folders(tmp_path / name, count=1)
    write_class_folders(tmp_path / "extra" / "without labels", count=1, classes=("any",))
    Image.fromarray(noise()).save(tmp_path / "loose.png")
    used = "images outside of the class folders are not used: extra/cat/0.png, extra/dog/0.png, "
    for place, others in (("more", "extra/without labels/any/0.png, "), ("extra/without labels", "")):
        _, (noted,) = load(tmp_path, unlabelled=place)
        assert noted.endswith(f": {used}{others}loose.png" + ", more/cat/0.png, more/dog/0.png" * (place != "more"))


def test_stray_image_beside_the_classes_of_a_part_does_not_make_the_part_a_class(tmp_path):
    for name in ("train", "test"):
        write_class_folders(tmp_path / name)
    Image.fromarray(noise()).save(tmp_path / "train" / "overview.png")
    dataset, (noted,) = load(tmp_path)
    assert dataset.spec.classes == ("cat", "dog") and len(dataset.train) == dataset.test.count == 12
    assert noted.endswith("images outside of the class folders are not used: train/overview.png")
    Image.fromarray(noise()).save(tmp_path / "test" / "overview.png")
    assert load(tmp_path)[1][0].endswith(": test/overview.png, train/overview.png")
    shutil.rmtree(tmp_path / "test")
    write_class_folders(tmp_path, classes=("bus",))  # without test images, a folder with images in it is a class
    assert load(tmp_path, folds=3)[0].spec.classes == ("bus", "train")


def test_class_folders_whose_names_differ_only_in_how_accents_are_stored(tmp_path):
    for part, form in (("train", "NFC"), ("test", "NFD")):
        write_class_folders(tmp_path / "parts" / part, classes=(unicodedata.normalize(form, "caf\u00e9"), "dog"))
        write_class_folders(tmp_path / "pool", classes=(unicodedata.normalize(form, "caf\u00e9"), "dog"))
    assert load(tmp_path / "parts")[0].test.count == 12
    assert "two folders have the name caf\u00e9, with its accents stored in two ways" in error_of(tmp_path / "pool", folds=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"folds": 1}, "folds=1; expected a number of folds of at least 2"),
        ({"folds": True}, "folds=True; expected"),
        ({"folds": 2.5}, "folds=2.5; expected"),
        ({"test": 2}, "test=2; expected a share of the images between 0 and 1"),
        ({"test": 1.5}, "test=1.5; expected"),
        ({"folds": 2, "pixels": "uint16"}, 'expected pixels="uint8" or "float"'),
        ({"folds": 2, "cache": "tape"}, 'cache="memory" or "disk"'),
        ({"folds": 2, "groups": "g.csv", "group_by": "(.)"}, "expected one of them"),
        ({"folds": 2, "groups": 3}, "groups=3, which is no path; expected the name of a CSV file"),
        ({"folds": 2, "group_by": 3}, "group_by=3 is no regular expression"),
        ({"folds": 2, "unlabelled": True}, "unlabelled=True, which is no path; expected a folder of images, such as unlabelled='../more'; Run("),
    ],
)
def test_wrong_options_are_refused(tmp_path, options, message):
    assert message in error_of(write_class_folders(tmp_path), **options)


@pytest.mark.parametrize("loader, path", [(data.folder, None), (data.arrays, 3)])
def test_what_is_no_path_is_refused(loader, path):
    with pytest.raises(ValueError, match=f"path={path}, which is no path; expected the path of a folder of images or of an .npz archive"):
        loader(path, folds=2)


def test_new_options_leave_fingerprints_of_older_runs_valid():
    run = Run(data=partial(data.folder, path="shapes", size=32))
    assert fingerprint(run) == "611f4743cc415c0d", "the fingerprint in version 0.2.0"
    assert fingerprint(Run(data=partial(data.arrays, path="x.npz", digits=True))) == "ce1751431c65058f"
    assert fingerprint(Run(data=partial(data.folder, path="shapes", size=32, folds=5))) != fingerprint(run)


def test_finished_runs_are_not_used_for_images_that_have_changed(tmp_path):
    """Another image draws other test images, so that a finished pretraining has seen some of them."""
    write_class_folders(tmp_path / "top", count=8)
    source = partial(data.folder, path=str(tmp_path / "top"), test=0.25, size=8)
    run = Run(data=source, model=TINY_VIT, val=2, steps=1, batch=4)
    fine_tuned = run.vary(init=run)
    assert fit(run, tmp_path / "run").finished
    assert fit(run, tmp_path / "run").data_sha256 == run.data().sha256
    Image.fromarray(noise()).save(tmp_path / "top" / "cat" / "more.png")
    for again in (lambda: fit(run, tmp_path / "run"), lambda: fit(fine_tuned, tmp_path / "tuned", init=tmp_path / "run")):
        with pytest.raises(ValueError, match=r"trained on other images or labels than folder.* contains now; restore the data"):
            again()
    shutil.move(tmp_path / "top", tmp_path / "elsewhere")
    assert fit(run, tmp_path / "run").finished, "the data are not needed any more"


@pytest.mark.slow
def test_finished_runs_are_not_used_for_classes_with_other_names(tmp_path):
    """The pixels and the numbers of the classes are the same, but a prediction has the old name."""
    top = write_class_folders(tmp_path / "top", count=8)
    run = Run(data=partial(data.folder, path=str(top), test=0.25, size=8), model=TINY_VIT, val=2, steps=1, batch=4)
    fit(run, tmp_path / "run")
    (record,) = launch([ArmRun(run=run, arm="a")], tmp_path / "runs", recipe="t", jobs=1)
    assert record.preprocess["classes"][0] == "cat"
    (top / "cat").rename(top / "bat")
    data.folder.cache_clear()
    with pytest.raises(ValueError, match="contains now; restore the data, also the names of its classes"):
        fit(run, tmp_path / "run")
    with pytest.raises(ValueError, match="contains now; restore the data, also the names of its classes"):
        launch([ArmRun(run=run.at_seed(seed), arm="a") for seed in range(2)], tmp_path / "runs", recipe="t", jobs=1)


@pytest.mark.slow
def test_where_decoded_images_are_kept_does_not_change_a_run(tmp_path, monkeypatch):
    """A run that was trained with one `cache` is not trained again with another one, and changed images are noticed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    top = write_class_folders(tmp_path / "images")
    run = Run(data=partial(data.folder, path=str(top), folds=2, size=8), model=TINY_VIT, steps=2, batch=4, val=0)
    memory, disk = (run.vary(data=partial(run.data, cache=cache)) for cache in ("memory", "disk"))
    assert fingerprint(memory) == fingerprint(disk) == fingerprint(run) and memory == disk
    assert rebuild(describe(disk)).data.keywords["cache"] == "disk", "the worker processes know it"
    (record,) = launch([ArmRun(run=memory, arm="a")], tmp_path / "runs", recipe="t", jobs=1)
    assert record.finished
    weights = next((tmp_path / "runs").rglob(WEIGHTS))
    before = weights.stat().st_mtime_ns
    (again,) = launch([ArmRun(run=disk, arm="a")], tmp_path / "runs", recipe="t", jobs=1)
    assert again == record and weights.stat().st_mtime_ns == before, "nothing was trained"
    Image.fromarray(noise()).save(top / "cat" / "0.png")
    data.folder.cache_clear()
    with pytest.raises(ValueError, match="1 run has finished on other images or labels"):
        launch([ArmRun(run=disk.at_seed(seed), arm="a") for seed in range(2)], tmp_path / "runs", recipe="t", jobs=1)


# Images without labels


def write_unlabelled(folder, count=5, c=3):
    """Write random PNG files, some of them in a subfolder."""
    (folder / "scanner 2").mkdir(parents=True)
    for i in range(count):
        Image.fromarray(noise(c=c)).save((folder if i % 2 else folder / "scanner 2") / f"{i}.png")


def test_images_without_labels_are_for_training_without_labels_alone(tmp_path):
    top = write_class_folders(tmp_path / "top")
    plain = data.folder(str(top), folds=3, size=8)
    write_unlabelled(top / "more")
    write_unlabelled(tmp_path / "outside")
    for place, name in (("more", "more/1.png"), ("../outside", "../outside/1.png"), (str(tmp_path / "outside"), "../outside/1.png")):
        dataset = data.folder(str(top), folds=3, size=8, unlabelled=place)
        shutil.rmtree(top / "more", ignore_errors=True)  # only now: a folder that is not named would be a class
        assert dataset.spec == plain.spec and torch.equal(dataset.train.images, plain.train.images)
        assert dataset.sha256 != plain.sha256 and len(dataset.unlabelled) == 5 and name in dataset.unlabelled.files
        assert data_text(dataset) == "data: top, 12 images of 2 classes, 3 folds, 5 images without labels"
    part = dataset.at_seed(1)
    assert part.unlabelled.spec == part.spec != dataset.spec and part.sha256 == dataset.sha256
    subset = part.subset(labels=None, val=2, seed=0)
    run = Run(data=data.digits, model=TINY_VIT, steps=3, batch=4, val=2)
    for changes in ({"objective": MAE, "unlabelled": True}, {"objective": partial(SemiSupervised, weak=(), strong=())}):
        made = Training(run.vary(**changes), part, subset, "cpu")
        images = made.images if changes.get("unlabelled") else made.pool
        seen = {bytes(image) for image in images.images.numpy()}
        assert len(images) == 6 + 5 and seen >= {bytes(image) for image in dataset.unlabelled.images.numpy()}
    assert len(Training(run, part, subset, "cpu").images) == 6, "supervised training does not see them"


def test_labels_of_images_without_labels_are_never_used(tmp_path):
    """They are all 0 because some number is needed; with pseudo-labels, the model's guesses replace them."""
    top = write_class_folders(tmp_path / "top", count=10, c=1)
    write_unlabelled(tmp_path / "more", c=1)
    dataset = data.folder(str(top), test=0.2, size=8, unlabelled="../more")
    other = replace(dataset, unlabelled=replace(dataset.unlabelled, labels=torch.ones(5, dtype=torch.int64)))
    subset = dataset.subset(labels=None, val=2, seed=0)
    run = Run(data=data.digits, model=TINY_VIT, steps=2, batch=8, val=2)
    semi = run.vary(objective=partial(SemiSupervised, weak=(), strong=(), align=True))
    spread = run.vary(init=run, pseudo_labels=partial(label_spreading, neighbors=3), unlabelled=True)
    for one in (semi, spread, run.vary(objective=MAE, unlabelled=True)):
        weights = []
        for part in (dataset, other):
            made = Training(one, part, subset, "cpu")
            made.train_step(), made.train_step()
            weights.append(made.objective.state_dict())
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_run_with_images_without_labels_counts_them(tmp_path, cache):
    """Decoded into memory and onto the disk, where they stay in the file of all images."""
    top = write_class_folders(tmp_path / "top", count=10, c=1)
    write_unlabelled(tmp_path / "more", count=25, c=1)
    records = []
    for kind in ("memory", "disk"):
        source = partial(data.folder, path=str(top), size=8, test=0.3, unlabelled="../more", cache=kind)
        run = Run(data=source, model=TINY_VIT, steps=3, batch=4, val=2, objective=MAE, unlabelled=True, evaluators=(knn,))
        records.append(fit(run, tmp_path / kind))
    assert records[0].unlabelled == 12 + 25 and records[0].test == records[1].test
    dataset = source()
    both = joined(dataset.train, dataset.unlabelled)
    assert isinstance(both.images, Rows) and both.files == dataset.train.files + dataset.unlabelled.files
    assert torch.equal(both.images[:], torch.cat([dataset.train.images[:], dataset.unlabelled.images[:]]))


def test_images_without_labels_need_no_group_and_may_be_left_out_if_broken(tmp_path):
    top = write_patients(tmp_path / "clinic")
    write_unlabelled(top / "more")
    (top / "more" / "broken.png").write_bytes(b"<html>404</html>")
    files = data.folder(str(top), folds=3, unlabelled="more", skip_broken=True).train.files
    assert "more/broken.png" in error_of(top, folds=3, unlabelled="more")
    (top / "patients.csv").write_text("".join(f"{file},{file[-7:-6]}\n" for file in files) + "more/1.png,9\n")
    for option in ({"group_by": r"(p\d)_\d+"}, {"groups": "patients.csv"}):
        dataset = data.folder(str(top), folds=3, unlabelled="more", skip_broken=True, **option)
        assert (len(dataset.groups), len(dataset.unlabelled), dataset.skipped) == (24, 5, 1)
        data.folder.cache_clear()


def test_image_without_a_label_that_is_a_test_image_is_noted(tmp_path):
    top = write_class_folders(tmp_path / "top")
    write_unlabelled(tmp_path / "more")
    shutil.copy(top / "cat" / "0.png", tmp_path / "more" / "copy.png")
    for split in ({"folds": 3}, {"test": 0.5}):
        dataset, notes = load(top, unlabelled="../more", **split)
        tested = split.get("folds") or "cat/0.png" in dataset.test.open().files
        assert notes == ["top: test images that are identical to an image without a label: 1; remove the images without a label, or the score may be too high"] * bool(tested)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("nowhere", "there is no such folder; expected a folder of images whose class is not known; its path is relative to"),
        ("empty", "there are no images in it"),
        ("cat/old", "has images of the class folders, "),
        (".", "has images of the class folders, "),
        ("small", "small/0.png is (3, 3, 3) (h, w, c) but cat/0.png is (6, 9, 3): set size="),
        ("broken", "no image in it can be read; replace the files, or leave unlabelled= out"),
    ],
)
def test_folders_without_labels_that_cannot_be_used_are_refused(tmp_path, place, message):
    write_class_folders(tmp_path, classes=("cat", "dog"))
    write_class_folders(tmp_path / "cat", classes=("old",))
    (tmp_path / "empty").mkdir()
    for name in ("small", "broken"):
        (tmp_path / name).mkdir()
    Image.fromarray(noise(3, 3)).save(tmp_path / "small" / "0.png")
    (tmp_path / "broken" / "0.png").write_bytes(b"<html>404</html>")
    for name in {"empty", "small", "broken"} - {place}:
        shutil.rmtree(tmp_path / name)
    assert message in error_of(tmp_path, folds=2, unlabelled=place, skip_broken=place == "broken")


def test_archives_may_hold_images_without_labels(tmp_path):
    more = GENERATOR.integers(0, 256, (7, 6, 5), np.uint8)
    dataset = data.arrays(write_npz(tmp_path / "a.npz", unlabelled_images=more), folds=2)
    assert np.array_equal(dataset.unlabelled.images[:, 0].numpy(), more) and len(dataset.train) == 20
    parts = {f"{part}_images": more for part in ("train", "test")} | {f"{part}_labels": np.arange(7) % 2 for part in ("train", "test")}
    path = write_npz(tmp_path / "b.npz", images=None, labels=None, unlabelled_images=more / 255, **parts)
    with pytest.warns(UserWarning, match="test images that are identical to an image without a label: 7"):
        dataset = data.arrays(path)
    assert np.array_equal(dataset.unlabelled.images[:, 0].numpy(), more)
    sized = data.at_size(partial(data.arrays, path), 12)
    assert sized.unlabelled.images.shape == (7, 1, 12, 12) and sized.unlabelled.spec == sized.spec
    with pytest.raises(ValueError, match=r"unlabelled images: expected uint8 images \(7, 1, 6, 5\)"):
        data.arrays(write_npz(tmp_path / "c.npz", unlabelled_images=more[:, 1:]), folds=2)


# Names of files


def test_names_of_files_follow_their_images(tmp_path):
    dataset = data.folder(str(write_class_folders(tmp_path)), folds=3)
    subset = dataset.at_seed(4).subset(labels=6, val=2, seed=4)
    for images in (dataset.train, subset.train, subset.val, dataset.at_seed(4).test.open(), dataset.train.take(slice(3))):
        for file, image, label in zip(images.files, images.images, images.labels):
            assert np.array_equal(np.array(Image.open(tmp_path / file)), image.permute(1, 2, 0).numpy())
            assert file.startswith(dataset.spec.classes[label])
    assert data.digits().train.take(slice(3)).files is None


# Float pixels


def write_deep_images(top):
    """Write 16-bit gray and color PNG files, float TIFF files and an 8-bit PNG file for each of two classes."""
    for name in ("cat", "dog"):
        (top / name).mkdir(parents=True)
        deep = GENERATOR.integers(0, 65536, (6, 9, 3)).astype(np.uint16)
        write_png_16(top / name / "color.png", deep)
        Image.fromarray(deep[..., 0]).save(top / name / "gray.png")
        Image.fromarray(deep[..., 1]).save(top / name / "gray.tif")
        Image.fromarray(GENERATOR.random((6, 9), np.float32)).save(top / name / "float.tif")
        Image.fromarray(noise(c=1)).save(top / name / "bytes.png")
    return top


def test_float_pixels_keep_all_bits(tmp_path):
    import torchvision

    train = data.folder(str(write_deep_images(tmp_path)), channels=3, folds=2, pixels="float").train
    assert train.images.dtype == torch.float32 and train.spec.dtype == "float32"
    for file, pixels in zip(train.files, train.pixels()):
        if "color" in file:
            stored = torchvision.io.decode_image(str(tmp_path / file), "UNCHANGED").float()
        else:
            stored = torch.from_numpy(np.array(Image.open(tmp_path / file)).astype(np.float32))[None].expand(3, -1, -1)
        scale = 1 if "float" in file else 255 if "bytes" in file else 65535
        torch.testing.assert_close(pixels, stored / scale, atol=1e-7, rtol=0)
    normalized = train.spec.normalize(train.pixels())
    torch.testing.assert_close(normalized.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(normalized.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", [{"channels": 3}, {"channels": 1, "size": 4}, {"channels": 4, "size": (7, 5)}], ids=str)
def test_prediction_on_files_gives_exactly_the_training_pixels(tmp_path, options):
    train = data.folder(str(write_deep_images(tmp_path)), **options, folds=2, pixels="float").train
    preprocess = Preprocess.from_dict(Preprocess.from_spec(train.spec).to_dict())
    assert preprocess.dtype == "float32" and torch.equal(preprocess([tmp_path / f for f in train.files]), train.spec.normalize(train.pixels()))
    assert train.pixels().min() >= 0 and train.pixels().max() <= 1, "bicubic resizing must not leave the range of an image"
    arrays = train.pixels().permute(0, 2, 3, 1).numpy()
    assert torch.equal(preprocess(arrays), preprocess(train.pixels()))
    sixteen = (arrays * 65535).round().astype(np.uint16)
    assert (preprocess.pixels(sixteen) - train.pixels()).abs().max() < 1e-5


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_pipe_with_the_name_of_an_image_is_named_and_not_waited_for(tmp_path):
    pipe = write_class_folders(tmp_path) / "cat" / "pipe.png"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=[b""], daemon=True)  # waits for a reader, so that none waits for it
    writer.start()
    assert "cat/pipe.png cannot be read as an image (it is a pipe, and no file)" in error_of(tmp_path, folds=2)
    os.close(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))  # ends the writer
    writer.join()


def test_home_folder_in_the_path_of_an_image(tmp_path, monkeypatch):
    home, here = write_class_folders(tmp_path / "home"), tmp_path / "here"
    (here / "~").mkdir(parents=True)
    (home / "cat" / "0.png").rename(home / "0.png")
    (home / "cat" / "1.png").rename(here / "~$1.png")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    preprocess = Preprocess(size=(6, 9), channels=3, mean=(0.0,) * 3, std=(1.0,) * 3, classes=("a", "b"))
    found = preprocess.pixels(home / "0.png")
    assert torch.equal(preprocess.pixels("~/0.png"), found) and torch.equal(preprocess.pixels([Path("~/0.png")]), found)
    with pytest.raises(ValueError, match=f"{home / 'cat'} is a folder or a pattern"):
        preprocess.pixels("~/cat")
    (home / "dog" / "0.png").rename(here / "~" / "0.png")
    assert not torch.equal(preprocess.pixels("~/0.png"), found), "a folder that is really called ~"
    assert preprocess.pixels("~$1.png").shape == (1, 3, 6, 9)


def test_preprocess_of_older_records_has_no_dtype_and_others_may_hold_any_float():
    old = {"size": [2, 2], "channels": 1, "mean": [0.0], "std": [1.0], "classes": ["a", "b"]}
    assert Preprocess.from_dict(old).dtype == "uint8" and Preprocess.from_dict(old).to_dict() == old
    wide = torch.tensor([[[-1000.0, 0.0], [1.0, 3000.0]]])
    assert torch.equal(Preprocess.from_dict(old | {"dtype": "float32"})(wide)[0], wide)
    with pytest.raises(ValueError, match="from -1e"):
        Preprocess.from_dict(old)(wide)
    with pytest.raises(ValueError, match="NaN or infinite"):
        Preprocess.from_dict(old | {"dtype": "float32"})(wide / 0)
    with pytest.raises(ValueError, match="dtype is 'int8'; expected uint8 or float32"):
        Preprocess.from_dict(old | {"dtype": "int8"})


def test_floats_outside_0_and_1_are_kept_with_a_note_and_nan_is_refused(tmp_path):
    write_deep_images(tmp_path)
    Image.fromarray(np.full((6, 9), 300, np.float32)).save(tmp_path / "cat" / "kelvin.tif")
    dataset, notes = load(tmp_path, channels=1, folds=2, pixels="float")
    assert dataset.train.pixels().max() == 300 and "to 300; they are kept" in " ".join(notes)
    Image.fromarray(np.full((6, 9), np.nan, np.float32)).save(tmp_path / "cat" / "nan.tif")
    assert "cat/nan.tif has NaN or infinite values" in error_of(tmp_path, channels=1, folds=2, pixels="float")


def test_color_tiff_files_of_16_bits_and_floats_are_read_by_tifffile(tmp_path):
    tifffile = pytest.importorskip("tifffile")
    values = {name: GENERATOR.integers(0, 65536, (6, 9, 3)).astype(np.uint16) for name in ("cat", "dog")}
    for name, deep in values.items():
        (tmp_path / name).mkdir()
        tifffile.imwrite(tmp_path / name / "deep.tif", deep, photometric="rgb")
        tifffile.imwrite(tmp_path / name / "double.tif", 1 - deep.astype(np.float64) / 65535, photometric="rgb")
    train = load(tmp_path, folds=2, pixels="float")[0].train
    for file, pixels in zip(train.files, train.pixels()):
        stored = torch.from_numpy(values[file[:3]].transpose(2, 0, 1) / 65535)
        assert pixels.sub(1 - stored if "double" in file else stored).abs().max() < 1e-6
    assert "deep.tif is RGB with 16 bits a channel" in error_of(tmp_path, folds=2)


def test_float_model_trains_and_predicts(tmp_path):
    from smallvit import PatchEmbed, ViT, fit
    from smallvit import load as load_model

    write_deep_images(tmp_path / "images")
    vit = partial(ViT, tokenizer=partial(PatchEmbed, patch=4), dim=16, depth=1, heads=2)
    source = partial(data.folder, path=str(tmp_path / "images"), size=8, channels=1, test=0.4, pixels="float")
    fit(Run(data=source, model=vit, steps=3, batch=4, val=2), tmp_path / "run")
    trained = load_model(tmp_path / "run")
    file = tmp_path / "images" / "cat" / "gray.png"
    train = source().train
    direct = trained.predict_proba(train.pixels()[list(train.files).index("cat/gray.png")]) if "cat/gray.png" in train.files else None
    assert direct is None or torch.equal(trained.predict_proba(file), direct)


@pytest.mark.parametrize("c", [1, 3])
def test_transparent_color_of_a_png_file_with_16_bits_is_not_read_as_opaque(c, tmp_path):
    values = np.full((2, 2, c), 1000, np.uint16)
    values[0, 0] = 1001  # would be equal with 8 bits
    write_png_16(tmp_path / "part.png", values, transparent=(1001,) * c)
    write_png_16(tmp_path / "none.png", values, transparent=(999,) * c)
    with pytest.raises(ValueError, match=r"part\.png is transparent in places"):
        read_image(tmp_path / "part.png", None, "L", "float")
    part, opaque = (read_image(tmp_path / f"{name}.png", None, "RGBA", "float").pixels for name in ("part", "none"))
    assert part[..., 3].tolist() == [[0, 1], [1, 1]] and (opaque[..., 3] == 1).all()
    assert np.array_equal(part[..., :3], opaque[..., :3]) and part[0, 0, 0] == np.float32(1001) / np.float32(65535)
    assert read_image(tmp_path / "none.png", None, None, "float").pixels.shape == (2, 2, c)


def test_hidden_color_of_transparent_pixels_has_no_effect_on_resized_images(tmp_path):
    """As with 8 bits, where Pillow resizes: a green half, and a transparent half with hidden red."""
    values = np.zeros((8, 8, 4), np.uint8)
    values[:, :4], values[:, 4:] = (0, 255, 0, 255), (255, 0, 0, 0)
    Image.fromarray(values).save(tmp_path / "8.png")
    write_png_16(tmp_path / "16.png", values.astype(np.uint16) * 257)
    bytes_read, exact = (read_image(tmp_path / f"{bits}.png", (8, 3), "RGBA", "float").pixels for bits in (8, 16))
    assert exact[0, 1].tolist() == pytest.approx([0, 1, 0, 0.5], abs=1e-6)
    assert np.abs(exact - bytes_read).max() < 0.005
    opaque = np.full((8, 8, 4), 65535, np.uint16)
    opaque[::2, :, :3] = 1000
    write_png_16(tmp_path / "opaque.png", opaque)
    write_png_16(tmp_path / "color.png", np.ascontiguousarray(opaque[..., :3]))
    one, other = (read_image(tmp_path / f"{name}.png", (5, 3), "RGBA", "float").pixels for name in ("opaque", "color"))
    assert np.array_equal(one, other)


def test_gray_pil_image_with_alpha_in_its_values_is_read():
    image = Image.fromarray(np.full((2, 3, 2), 255, np.uint8), "LA").convert("La")
    assert (read_image(image, None, None).pixels == np.full((2, 3, 1), 255)).all()


def test_floats_that_are_too_large_for_32_bits_are_refused(tmp_path):
    images = np.full((20, 6, 5), 1e300)
    with pytest.raises(ValueError, match=r"expected finite floats up to 3.4e38 \(float32\), but image 0 has 1e\+300"):
        data.arrays(write_npz(tmp_path / "a.npz", images=images), folds=2, pixels="float")


def test_images_of_an_archive_are_all_floats_or_all_integers(tmp_path):
    labels = {"train_labels": np.arange(8) % 2, "test_labels": np.arange(8) % 2, "images": None, "labels": None}
    path = write_npz(tmp_path / "a.npz", train_images=noise(8, 6, 5), test_images=noise(8, 6, 5) / 1.0, **labels)
    with pytest.raises(ValueError, match=r"floats and of integers \(train_images uint8, test_images float64\)"):
        data.arrays(path, pixels="float")


def test_nearly_black_bytes_are_noted_at_prediction():
    preprocess = Preprocess(size=(2, 2), channels=1, mean=(0.0,), std=(1.0,), classes=("a", "b"))
    with pytest.warns(UserWarning, match="largest pixel is 1 of 255, so they are nearly black"):
        preprocess.pixels(np.eye(2, dtype=np.uint8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        preprocess.pixels(np.zeros((2, 2), np.uint8))


# TIFF


def test_tiff_files_that_pillow_would_read_as_other_pixels(tmp_path):
    tifffile = pytest.importorskip("tifffile")
    ramp = np.arange(48, dtype=np.uint16).reshape(4, 4, 3) * 1_000
    planar, inverted, signed, unknown = (tmp_path / f"{name}.tif" for name in ("planar", "inverted", "signed", "unknown"))
    tifffile.imwrite(planar, np.moveaxis(ramp, -1, 0), photometric="rgb", planarconfig="separate")
    tifffile.imwrite(inverted, ramp[..., 0], photometric="miniswhite")
    tifffile.imwrite(signed, np.array([[-1, 5]], np.int8))
    tifffile.imwrite(white := tmp_path / "white.tif", ramp[..., 0].astype(np.float32) / 65_535, photometric="miniswhite")
    tifffile.imwrite(unknown, noise(4, 4, 4), photometric="rgb", extrasamples=["unspecified"])
    assert np.array_equal(read_image(planar, None, None, "float").pixels, ramp.astype(np.float32) / np.float32(65_535))
    opaque = np.stack([ramp[..., 0], np.full_like(ramp[..., 0], 65_535)], axis=-1)
    tifffile.imwrite(gray_alpha := tmp_path / "gray_alpha.tif", opaque, photometric="miniswhite", extrasamples=["unassalpha"])
    for file in (inverted, gray_alpha):
        brightness = read_image(file, None, None, "float").pixels[..., 0]
        assert np.allclose(brightness, 1 - ramp[..., 0] / 65_535, atol=1e-6)
    for file, pixels, message in (
        (planar, "uint8", "16 bits a channel"),
        (signed, "uint8", "bytes with a sign"),
        (unknown, "uint8", "ExtraSamples 0"),
        (unknown, "float", "ExtraSamples 0"),
        (white, "float", "floats of which 0 is white"),
    ):
        with pytest.raises(ValueError, match=message):
            read_image(file, None, None, pixels)


# DICOM


def test_dicom_files_give_bytes_units_or_shares_and_inverted_grays_are_turned(tmp_path):
    pytest.importorskip("pydicom")
    ct, xray, us = (tmp_path / f"{name}.dcm" for name in ("ct", "xray", "us"))
    write_dicom(ct, np.array([[0, 1024], [2048, 4095]], np.uint16), bits=12, RescaleSlope=1, RescaleIntercept=-1024)
    write_dicom(xray, np.array([[0, 4095]], np.uint16), "MONOCHROME1", bits=12)
    write_dicom(us, np.array([[[255, 0, 7]]], np.uint8), "RGB")
    inverted_ct, empty = tmp_path / "inverted.dcm", tmp_path / "empty.dcm"
    write_dicom(inverted_ct, np.array([[0, 4095]], np.uint16), "MONOCHROME1", bits=12, RescaleSlope=1, RescaleIntercept=-1024)
    write_dicom(empty, np.array([[0, 4095]], np.uint16), bits=12, RescaleSlope=None, RescaleIntercept=None)
    signed = tmp_path / "signed.dcm"
    write_dicom(signed, np.array([[-1000, 40]], np.int16), RescaleSlope=1, RescaleIntercept=0)

    def read(file, channels=1, size=(1, 2)):
        spec = {"size": size, "channels": channels, "mean": (0.0,) * channels, "std": (1.0,) * channels, "classes": ("a", "b")}
        return Preprocess(**spec, dtype="float32").pixels(file).flatten().tolist()

    assert read(ct, size=(2, 2)) == [-1024, 0, 1024, 3071] and read(xray) == [1, 0] and read(signed) == [-1000, 40]
    assert read(inverted_ct) == [-1024, 3071] and read(empty) == [0, 1], "a unit stays a unit; an empty rescale is none"
    assert read(us, 3, (1, 1)) == pytest.approx([1, 0, 7 / 255])
    write_class_folders(tmp_path / "top", c=1)
    for file in (ct, us):
        (tmp_path / "top" / "cat" / file.name).write_bytes(file.read_bytes())
    message = error_of(tmp_path / "top", folds=2, size=4, channels=1)
    assert 'cat/ct.dcm is a DICOM file with rescaled values: expected 8 bits; pixels="float"' in message and "us.dcm" not in message


def test_dicom_without_pydicom_names_the_extra(tmp_path, monkeypatch):
    write_class_folders(tmp_path)
    (tmp_path / "cat" / "x.dcm").write_bytes(b"DICM")
    monkeypatch.setitem(sys.modules, "pydicom", None)
    assert "pip install 'smallvit[dicom]'" in error_of(tmp_path, folds=2)


@pytest.mark.parametrize("kept", ["memory", "disk"])
@pytest.mark.parametrize("file", ["first.dcm", "last.dcm", "first.tif", "last.tif"])
def test_missing_package_is_no_broken_image(file, kept, tmp_path, cache, monkeypatch):
    """Otherwise all images of a class could be left out, and the cache would leave them out also when the package is there."""
    package = {".dcm": "pydicom", ".tif": "tifffile"}[Path(file).suffix]
    top = write_class_folders(tmp_path / "top", classes=("goat", "horse"))
    if package == "pydicom":
        write_dicom(top / "goat" / file, noise(), "RGB")
    else:
        pytest.importorskip("tifffile").imwrite(top / "goat" / file, GENERATOR.integers(0, 65536, (6, 9, 3)).astype(np.uint16), photometric="rgb")
    for old in (top / "goat").glob("?.png"):
        old.rename(old.with_name(f"image_{old.name}"))
    options = {"folds": 2, "pixels": "float", "skip_broken": True, "cache": kept}
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, package, None)
        assert f"needs the package {package}: pip install" in error_of(top, **options)
    assert load(top, **options)[0].skipped == 0


# Duplicates


def test_identical_images_across_train_and_test_are_named(tmp_path):
    for split in ("train", "test", "val"):
        write_class_folders(tmp_path / split, count=14)
    (tmp_path / "test" / "dog" / "0.png").write_bytes((tmp_path / "train" / "dog" / "3.png").read_bytes())
    dataset, notes = load(tmp_path)
    assert dataset.repeats == 1 and dataset.test.reads == 0
    assert len(notes) == 1 and "identical to an image of another part: 1, train/dog/3.png = test/dog/0.png" in notes[0]
    for i in range(12):
        (tmp_path / "test" / "cat" / f"{i}.png").write_bytes((tmp_path / "train" / "dog" / f"{i}.png").read_bytes())
    data.folder.cache_clear()
    across, labels = load(tmp_path)[1]
    assert "part: 13, " in across and across.count(" = ") == 10 and "and 3 more" in across
    assert "identical to an image with another label: 12, " in labels and labels.count(" = ") == 10


@pytest.mark.parametrize("options", [{"folds": 3}, {"test": 0.3}, {"folds": 3, "test": 0.5}], ids=str)
def test_identical_images_stay_on_one_side(tmp_path, options):
    write_class_folders(tmp_path, count=12)
    for name in ("cat", "dog"):
        for i in range(5):
            (tmp_path / name / f"{i}_copy.png").write_bytes((tmp_path / name / f"{i}.png").read_bytes())
    dataset, notes = load(tmp_path, **options)
    assert not notes
    for seed in range(6):
        part = dataset.at_seed(seed)
        subset = part.subset(labels=None, val=None, seed=seed)
        assert part.repeats == 0 and not set(subset.val.pixel_hashes) & set(subset.train.pixel_hashes) and len(subset.val) > 0


# .npz archives


def test_copies_of_a_training_image_are_not_validation_images(tmp_path):
    for part, copies in (("train", 4), ("test", 1)):
        for name in ("cat", "dog"):
            write_class_folders(tmp_path / part, count=5, classes=(name,))
            for file in [*(tmp_path / part / name).iterdir()]:
                for copy in range(1, copies):
                    shutil.copy(file, file.with_name(f"{file.stem}-{copy}.png"))
    by_folder = load(tmp_path)[0]
    labels = {f"{part}_labels": np.repeat([0, 1], 4) for part in ("train", "test")}
    images = {"train_images": np.repeat(noise(4, 6, 5), 2, axis=0), "test_images": noise(8, 6, 5), "images": None, "labels": None}
    archive = data.arrays(write_npz(tmp_path / "a.npz", **images, **labels))
    for dataset in (by_folder, archive):
        for seed in range(4):
            subset = dataset.subset(labels=None, val=None, seed=seed)
            assert len(subset.val) and not {*subset.val.pixel_hashes} & {*subset.train.pixel_hashes}


def write_npz(path, n=20, **changes):
    content = {"images": GENERATOR.integers(0, 256, (n, 6, 5), np.uint8), "labels": np.arange(n) % 2} | changes
    np.savez(path, **{name: array for name, array in content.items() if array is not None})
    return str(path)


def test_archives_without_a_test_part_are_split(tmp_path):
    path = write_npz(tmp_path / "a.npz", groups=np.repeat([f"p{i}" for i in range(10)], 2))
    dataset = data.arrays(path, folds=5)
    assert dataset.folds == 5 and len(dataset.train) == 20 and dataset.groups.tolist() == [i // 2 for i in range(20)]
    both = data.arrays(path, folds=2, test=0.4)
    assert sorted(both.at_seed(0).fold.positions.tolist() + both.at_seed(1).fold.positions.tolist()) == both.pool_index.tolist()
    assert len(both.pool) == data.arrays(path, test=0.4).test.count and len(data.arrays(path, test=0.0).train) == 20
    held_out = data.arrays(path, test=0.2)
    assert held_out.test.count == 4 and not set(held_out.groups.tolist()) & set(held_out.test_groups.tolist())
    with pytest.raises(ValueError, match="expected either folds=5"):
        data.arrays(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": np.zeros((20, 14), int)}, r"one integer for each image, got 14 labels \(multi-label\), such as .*ChestMNIST.*labels\[:, 0\]"),
        ({"images": np.zeros((20, 28, 28, 28), np.uint8)}, "3-D volumes, such as those of OrganMNIST3D"),
        ({"images": np.zeros((20, 28, 28, 28, 3), np.uint8)}, "3-D volumes"),
        ({"labels": np.eye(2, dtype=int)[np.arange(20) % 2]}, r"all labels: .* got one-hot labels of 2 classes; save labels.argmax\(1\)"),
        ({"labels": np.eye(3)[np.arange(20) % 3]}, r"got one-hot labels of 3 classes; save labels.argmax\(1\)"),
        ({"labels": np.eye(2)[np.arange(20) % 2] * 2}, r"got 2 labels \(multi-label\)"),
        ({"groups": np.zeros(3, int)}, "groups: expected 20 integers or texts"),
        ({"groups": np.zeros(20)}, "groups: expected 20 integers or texts, got float64"),
        ({"labels": None}, "leave it out|has no"),
        ({"labels": np.arange(20) % 2 + 1}, "labels must be 0, 1, 2"),
        ({"test_images": np.zeros((2, 6, 5), np.uint8)}, "has images, labels, and also test_images, which would not be used"),
        ({"group": np.arange(20)}, r"arrays with unknown names, .* group \(did you mean groups\?\); expected only the names"),
        ({"patients": np.arange(20), "unlabeled_images": np.zeros((2, 6, 5))}, r"patients, unlabeled_images \(did you mean unlabelled_images"),
        ({"images": None, "image": np.zeros((20, 6, 5), np.uint8)}, r"image \(did you mean images\?\)"),
        ({"train_images": np.zeros((2, 6, 5), np.uint8)}, "has the parts train and test, and also images, labels, which would not"),
    ],
)
def test_archives_that_cannot_be_used_are_refused_by_name(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        data.arrays(write_npz(tmp_path / "a.npz", **changes), folds=2)


def test_a_group_is_one_however_its_accents_are_stored(tmp_path):
    """A Mac stores an accent as a character of its own, other systems do not. A patient must not be on both sides of a split."""
    names, top = ["P\u00e9", "Pe\u0301"], tmp_path / "top"
    for name in ("ill", "well"):
        (top / name).mkdir(parents=True)
        for patient in range(4):
            for i in range(4):
                Image.fromarray(noise()).save(top / name / f"{names[i % 2]}{patient}_{i}.png")
    by_name = data.folder(str(top), folds=2, group_by=r"(.*)_\d+")
    assert len(by_name.groups.unique()) == 4
    assert len(data.folder(str(top), folds=2, group_by=r"(P.\d+)_\d+").groups.unique()) == 4, "an accent is no character"
    assert len(data.folder(str(top), folds=2, group_by=rf"({names[1]}\d+)_\d+").groups.unique()) == 4
    files = [file for file in by_name.train.files]
    (top / "groups.csv").write_text("".join(f"{file},{file.split('/')[1].split('_')[0]}\n" for file in files), encoding="utf-8")
    assert len(data.folder(str(top), folds=2, groups="groups.csv").groups.unique()) == 4
    groups = np.array([f"{names[i % 2]}{i // 5}" for i in range(20)])
    assert len(data.arrays(write_npz(tmp_path / "a.npz", groups=groups), folds=2).groups.unique()) == 4


def test_spaces_around_the_name_of_a_group_do_not_matter(tmp_path):
    groups = np.array([f"p{i // 4}" + " " * (i % 2) for i in range(20)])
    assert len(data.arrays(write_npz(tmp_path / "a.npz", groups=groups), folds=2).groups.unique()) == 5


@pytest.mark.parametrize("head", ['"file";"group, by patient"\n', '"cat/0.png";"Smith, ""Al"""\n', 'file;"group,\nof patients"\n'])
def test_commas_in_quotes_do_not_separate_the_columns_of_groups(head, tmp_path):
    top = write_class_folders(tmp_path)
    lines = [f"{path.relative_to(top)};{i // 2}\n" for i, path in enumerate(sorted(top.glob("*/*.png")))]
    (top / "groups.csv").write_text(head + "".join(lines["cat/0" in head :]))
    assert len(data.folder(str(top), test=0.0, groups="groups.csv").groups.unique()) == (7 if "cat/0" in head else 6)


def test_classes_of_the_parts_agree_however_their_accents_are_stored(tmp_path):
    for part, name in (("train", "\u00e9lan"), ("test", "e\u0301lan")):
        write_class_folders(tmp_path / "top" / part, classes=("zebra", name))
    dataset = data.folder(str(tmp_path / "top"))
    test = dataset.test.open()
    for images in (dataset.train, test):
        assert {file.split("/")[1]: label for file, label in zip(images.files, images.labels.tolist())}["zebra"] == 0


def test_folders_that_cannot_be_read_are_named_unless_they_are_not_used(tmp_path, monkeypatch):
    for part in ("train", "test"):
        write_class_folders(tmp_path / part)
        write_class_folders(tmp_path / part / "cat", classes=("more",))
    write_class_folders(tmp_path, classes=("lost+found",))
    walk, iterdir, locked = os.walk, Path.iterdir, []

    def walk_readable(top, onerror=None, **options):
        for root, *names in walk(top, **options):
            if Path(root).name not in locked:
                yield root, *names
            elif onerror is not None:
                onerror(PermissionError(errno.EACCES, "Permission denied", root))

    def iterdir_readable(folder):
        if folder.name in locked:
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return iterdir(folder)

    monkeypatch.setattr(os, "walk", walk_readable)
    monkeypatch.setattr(Path, "iterdir", iterdir_readable)
    locked.append("lost+found")
    assert len(load(tmp_path)[0].train) == 18
    locked.append("more")
    message = error_of(tmp_path)
    assert f"{tmp_path / 'train' / 'cat' / 'more'} cannot be read (Permission denied); make it readable, or move it" in message
    assert "more cannot be read" in error_of(tmp_path / "train", folds=2)


def test_links_to_a_folder_above_are_not_followed(tmp_path):
    top = write_class_folders(tmp_path / "top")
    (top / "cat" / "up").symlink_to("..")
    (top / "cat" / "self").symlink_to(".")
    (top / "dog" / "elsewhere").symlink_to(write_class_folders(tmp_path / "more", classes=("dogs",)) / "dogs")
    dataset = data.folder(str(top), test=0.0)
    assert dataset.train.labels.bincount().tolist() == [6, 12]


def test_groups_in_a_file_with_odd_names_and_a_line_without_an_image(tmp_path):
    top = write_class_folders(tmp_path / "top")
    (top / "cat" / "0.png").rename(top / "cat" / "a\u2028b.png")
    lines = [f"{path.relative_to(top)},{i // 2}" for i, path in enumerate(sorted(top.glob("*/*.png")))]
    (top / "groups.csv").write_text("\n".join(lines))
    assert len(data.folder(str(top), test=0.3, groups="groups.csv").groups.unique()) < 6
    (top / "groups.csv").write_text("\n".join([*lines, "cat/lost.png,9"]))
    with pytest.raises(ValueError, match=r"lines without an image: cat/lost.png; expected a line for each image"):
        data.folder(str(top), test=0.3, groups="groups.csv", skip_broken=True)


# The cache on disk


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SMALLVIT_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "cache" / "folders"
    data.folder.cache_clear()


def complete(cache):
    return [entry for entry in cache.iterdir() if entry.is_dir() and not entry.name.endswith(".new")]


@pytest.mark.parametrize("pixels", ["uint8", "float"])
def test_pixels_on_disk_equal_those_in_memory(tmp_path, cache, pixels):
    top = write_class_folders(tmp_path / "top", count=9)
    (top / "cat" / "broken.png").write_text("no image")
    options = {"size": 5, "folds": 3, "skip_broken": True, "pixels": pixels}
    memory, disk = (data.folder(str(top), **options, cache=kind) for kind in ("memory", "disk"))
    assert len(complete(cache)) == 1 and disk.sha256 == memory.sha256 and disk.skipped == memory.skipped == 1
    assert disk.spec == memory.spec and type(disk.train.images).__name__ == "Rows"
    for seed in (0, 4):
        one, other = (dataset.at_seed(seed) for dataset in (memory, disk))
        assert one.spec == other.spec and one.test.sha256 == other.test.sha256 and one.repeats == other.repeats
        one, other = (part.subset(labels=6, val=None, seed=seed) for part in (one, other))
        assert torch.equal(one.train.pixels(), other.train.pixels()) and one.val.files == other.val.files
        index = torch.tensor([3, 0, 3])
        assert torch.equal(one.train.images[index], other.train.images[index]) and one.train.sha256 == other.train.sha256
        assert torch.equal(torch.cat([x for x, _ in one.val.batches(2)]), torch.cat([x for x, _ in other.val.batches(2)]))
        assert torch.equal(one.train.images.permute(1, 0, 2, 3), other.train.images.permute(1, 0, 2, 3))
        assert torch.equal(torch.cat([one.train.images, one.val.images]), torch.cat([other.train.images, other.val.images]))


def test_pixels_on_disk_are_used_in_formulas_like_a_tensor(tmp_path, cache):
    top = write_class_folders(tmp_path / "top")
    memory, disk = (data.folder(str(top), folds=2, cache=kind).train.images for kind in ("memory", "disk"))
    assert isinstance(disk, Rows)
    for formula in (
        lambda x: x / 255.0, lambda x: 1 - x / 255, lambda x: (x + 1) * 2 % 7, lambda x: 3 // (x + 1.0), lambda x: abs(-x), lambda x: x**2,
        lambda x: x[..., 0], lambda x: x[:, 0], lambda x: x[0, 1], lambda x: x[None], lambda x: x[x > 100], lambda x: ~x & 7 | x ^ 3,
        lambda x: x > 100, lambda x: x <= 100, lambda x: x == memory, lambda x: x != 0, lambda x: x - x, lambda x: memory / (x + 1.0),
    ):  # fmt: skip
        assert torch.equal(formula(disk), formula(memory))


def test_disk_is_used_when_the_pixels_take_more_than_a_quarter_of_the_memory(tmp_path, cache, monkeypatch):
    from smallvit.data import cache as module

    top = write_class_folders(tmp_path / "top")
    needed = 12 * 6 * 9 * 3
    assert module.available_memory() > 2**20
    for available, kind in ((needed * 4, "Tensor"), (needed * 4 - 1, "Rows")):
        monkeypatch.setattr(module, "available_memory", lambda available=available: available)
        data.folder.cache_clear()
        assert type(data.folder(str(top), folds=2).train.images).__name__ == kind


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"memory.max": "9000", "memory.current": "5000", "memory.stat": "anon 1\ninactive_file 1000\n"}, 5000),
        ("0::/job/step\n", {"job/memory.max": "800", "job/memory.current": "900", "job/memory.stat": "inactive_file 0",
                            "job/step/memory.max": "max"}, 0),
        ("5:cpu:/x\n4:memory:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": "9000", "memory/job/memory.usage_in_bytes": "5000",
                                              "memory/job/memory.stat": "total_inactive_file 10"}, 4010),
        ("0::/\n", {"memory.max": "max", "memory.current": "5000", "memory.stat": "inactive_file 0"}, 12_345),
        ("0::/\n", {}, 12_345),
        (None, {}, 12_345),
    ],
)  # fmt: skip
def test_available_memory_is_at_most_the_limit_of_the_control_group(groups, files, expected, tmp_path, monkeypatch):
    from smallvit.data import cache as module

    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if groups is not None:
        (tmp_path / "own").write_text(groups)
    monkeypatch.setattr(module, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(module, "OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr(module, "free_memory", lambda: 12_345)
    assert module.available_memory() == expected


def test_labels_of_test_images_on_disk_are_checked_without_reading_the_images(tmp_path, cache, monkeypatch):
    top = write_class_folders(tmp_path / "top", count=9)
    loaded = data.folder(str(top), test=0.3, cache="disk")
    expected = loaded.test.open().labels
    monkeypatch.setattr(Rows, "__getitem__", lambda rows, index: pytest.fail("the images were read"))
    blank = loaded.test.without_pixels()
    assert torch.equal(blank.labels, expected) and blank.images.shape == (len(expected), 3, 6, 9) and not blank.images.any()
    assert blank.images.dtype == torch.uint8


def test_cached_pixels_are_used_until_a_file_changes_and_errors_leave_no_cache(tmp_path, cache, monkeypatch):
    top = write_class_folders(tmp_path / "top")
    first = data.folder(str(top), folds=2, cache="disk").sha256
    with monkeypatch.context() as patch:
        patch.setattr("smallvit.data.cache._decode_all", None)
        data.folder.cache_clear()
        assert data.folder(str(top), folds=2, cache="disk").sha256 == first
    Image.fromarray(noise()).save(top / "cat" / "0.png")
    data.folder.cache_clear()
    assert data.folder(str(top), folds=2, cache="disk").sha256 != first and len(complete(cache)) == 2
    (top / "cat" / "1.png").write_text("no image")
    assert "cat/1.png cannot be read" in error_of(top, folds=2, cache="disk")
    assert len(complete(cache)) == 2 and not [*cache.glob(".*.new")]


@pytest.mark.parametrize("damage", ["no pixels", "empty pixels", "other pixels", "no facts", "torn facts", "other facts"])
def test_damaged_cache_is_made_again(damage, tmp_path, cache):
    top = write_class_folders(tmp_path / "top")
    first = data.folder(str(top), folds=2, cache="disk").sha256
    (stored,) = complete(cache)
    kind, what = damage.split()
    file = stored / ("pixels.npy" if what == "pixels" else "facts.json")
    file.unlink()
    if kind != "no":
        file.write_text({"empty": "", "torn": '{"problems": [', "other": "{}"}[kind])
    if damage == "other pixels":
        np.save(file, np.zeros((12, 3, 6, 8), np.uint8))
    data.folder.cache_clear()
    again = data.folder(str(top), folds=2, cache="disk")
    assert again.sha256 == first == data.folder(str(top), folds=2, cache="memory").sha256 and complete(cache) == [stored]


def load_hash(top, queue):
    queue.put(data.folder(top, folds=2, cache="disk").sha256)


@pytest.mark.slow
def test_several_processes_share_one_cache(tmp_path, cache):
    top = str(write_class_folders(tmp_path / "top", count=40))
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=load_hash, args=(top, queue)) for _ in range(2)]
    for process in processes:
        process.start()
    hashes = {queue.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
    assert hashes == {data.folder(top, folds=2, cache="memory").sha256} and len(complete(cache)) == 1


@pytest.mark.slow
def test_killed_process_leaves_no_cache_that_is_used(tmp_path, cache):
    top = str(write_class_folders(tmp_path / "top"))
    code = """
import os, sys
from smallvit.data import cache, folder
decode = cache._decode_all
def die(*arguments):
    decode(*arguments)
    os._exit(9)
cache._decode_all = die
folder(sys.argv[1], folds=2, cache="disk")
"""
    done = subprocess.run([sys.executable, "-c", code, top], cwd=Path(__file__).parents[1], env=os.environ | {"SMALLVIT_CACHE": str(tmp_path / "cache")})
    assert done.returncode == 9 and not complete(cache) and [*cache.glob(".*.new")]
    assert data.folder(top, folds=2, cache="disk").sha256 == data.folder(top, folds=2, cache="memory").sha256
    assert len(complete(cache)) == 1 and not [*cache.glob(".*.new")]


def test_folder_without_locks_is_decoded_by_two_processes_and_the_first_one_counts(tmp_path, cache, monkeypatch):
    def refused(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    from smallvit.data import cache as module

    top, decode = str(write_class_folders(tmp_path / "top")), module._decode_all

    def decode_after_another(*arguments):
        monkeypatch.setattr(module, "_decode_all", decode)
        data.folder.cache_clear()
        with monkeypatch.context() as patch:  # another process, which needs the same files and is faster
            patch.setattr("os.getpid", os.getppid)
            data.folder(top, folds=2, cache="disk")
        return decode(*arguments)

    monkeypatch.setattr("fcntl.flock", refused)
    monkeypatch.setattr("smallvit.storage.LOCKABLE", {})
    monkeypatch.setattr(module, "_decode_all", decode_after_another)
    found = data.folder(top, folds=2, cache="disk").sha256
    assert found == data.folder(top, folds=2, cache="memory").sha256
    assert len(complete(cache)) == 1 and len([*cache.iterdir()]) == 1


def test_full_disk_is_refused_before_decoding(tmp_path, cache, monkeypatch):
    top = write_class_folders(tmp_path / "top")
    monkeypatch.setattr("shutil.disk_usage", lambda path: os.terminal_size((0, 0)) and type("Usage", (), {"free": 10}))
    assert "set the environment variable SMALLVIT_CACHE" in error_of(top, folds=2, cache="disk")


def test_run_on_mapped_pixels_equals_the_run_in_memory(tmp_path, cache):
    from safetensors.torch import load_file

    from smallvit import PatchEmbed, ViT, fit

    top = str(write_class_folders(tmp_path / "top", count=15))
    vit = partial(ViT, tokenizer=partial(PatchEmbed, patch=4), dim=16, depth=1, heads=2)
    records = []
    for kind in ("memory", "disk"):
        run = Run(data=partial(data.folder, path=top, size=8, test=0.3, cache=kind), model=vit, steps=5, batch=4)
        records.append(fit(run, tmp_path / kind))
    assert records[0].test == records[1].test and records[0].data_sha256 == records[1].data_sha256
    one, other = (load_file(next((tmp_path / kind).glob("*.safetensors"))) for kind in ("memory", "disk"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# Groups in files


def write_patients(top, patients=6):
    """Write 4 images of each patient: two in each class, named p0_0.png and so on."""
    for name in ("ill", "well"):
        (top / name).mkdir(parents=True, exist_ok=True)
        for patient in range(patients):
            for i in range(2):
                Image.fromarray(noise()).save(top / name / f"p{patient}_{i}.png")
    return top


def test_groups_are_read_from_names_or_a_csv_file(tmp_path):
    top = write_patients(tmp_path)
    by_name = data.folder(str(top), folds=3, group_by=r"(.*)_\d+")
    files = by_name.train.files
    assert [f"p{group}" for group in by_name.groups.tolist()] == [file.split("/")[1].split("_")[0] for file in files]
    for header, separator in (("", ","), ("file,group\n", ","), ("image;patient\n", ";")):
        lines = [f"{file}{separator}{file.split('/')[1].split('_')[0]}" for file in files]
        (top / "patients.csv").write_text(header + "\n".join(lines[::-1]) + "\n", encoding="utf-8-sig")
        assert torch.equal(data.folder(str(top), folds=3, groups="patients.csv").groups, by_name.groups)
    (top / "patients.csv").write_text("".join(f"{file},{i // 4}\n" for i, file in enumerate(files)))
    assert data.folder(str(top), folds=3, groups="patients.csv").groups.tolist() == [i // 4 for i in range(24)]


def test_csv_file_may_name_files_without_their_folders_if_they_are_unique(tmp_path):
    top = write_patients(tmp_path)
    for path in (top / "well").iterdir():
        path.rename(path.with_name(f"w{path.name}"))
    by_name = data.folder(str(top), folds=3, group_by=r"w?(p\d+)_\d+")
    names = [file.split("/")[1] for file in by_name.train.files]
    (top / "patients.csv").write_text("\n".join(f"{name},patient {name.split('_')[0].strip('w')}" for name in names))
    assert torch.equal(data.folder(str(top), folds=3, groups="patients.csv").groups, by_name.groups)
    first = by_name.train.files[0]
    other = next(path for path in top.iterdir() if path.is_dir() and path.name != first.split("/")[0])
    shutil.copy(top / first, other / names[0])  # now the name alone could be either of the two
    data.folder.cache_clear()
    with pytest.raises(ValueError, match=rf"no group for .*{names[0]}.*with its path in the folder, such as"):
        data.folder(str(top), folds=3, groups="patients.csv")


def test_csv_file_may_have_other_slashes_and_accents(tmp_path):
    top = write_class_folders(tmp_path, classes=("Füchse", "dog"))
    files = data.folder(str(top), folds=2).train.files
    lines = [unicodedata.normalize("NFD", file).replace("/", "\\") + f",{i // 2}" for i, file in enumerate(files)]
    (top / "g.csv").write_text("\n".join(lines), encoding="utf-8")
    assert data.folder(str(top), folds=2, groups="g.csv").groups.tolist() == [i // 2 for i in range(12)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ill/p0_0.png,p0\nill/absent.png,p9\n", "no group for ill/p0_1.png, .* and lines without an image: ill/absent.png"),
        ("ill/p0_0.png,p0\nill/p0_0.png,p1\n", "is in two groups, p0 and p1"),
        ("ill/p0_0.png\n", "line 1: expected two columns"),
        ("file,group\n\n\nill/p0_0.png,1,2\n", "line 4: expected two columns"),
        ("", "no group for"),
        ('file,group\n\nill/p0_0.png,"p0\n' + "ill/p0_1.png,p0\n" * 10_000, "patients.csv, line 3, cannot be read .* quotation mark"),
        (None, "patients.csv' cannot be read"),
    ],
)
def test_csv_files_that_do_not_fit_are_refused_with_the_files(tmp_path, text, message):
    top = write_patients(tmp_path)
    if text is not None:
        (top / "patients.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        data.folder(str(top), folds=3, groups="patients.csv")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (r"(p[0-4])_\d+", r"does not match ill/p5_0.png, ill/p5_1.png, well/p5_0.png and 1 more; for example"),
        (r".*_\d+", "no parentheses"),
        (r"(.*", "no regular expression"),
    ],
)
def test_expressions_that_do_not_fit_are_refused_with_the_files(tmp_path, pattern, message):
    assert message in error_of(write_patients(tmp_path), folds=3, group_by=pattern)


def test_the_plan_says_how_many_groups_there_are(tmp_path):
    top = write_patients(tmp_path / "clinic")
    text = "data: clinic, 24 images of 2 classes, 3 folds"
    assert data_text(data.folder(str(top), folds=3)) == text
    assert data_text(data.folder(str(top), folds=3, group_by=r"(p\d)_\d+")) == f"{text}, 6 groups of 4 images, which stay together"
    assert data_text(data.folder(str(top), folds=3, test=0.5)) == f"{text} of 12 of them"
    assert data_text(data.digits()).startswith("data: digits, 1,297 training and 500 test images of 10 classes")


def test_files_that_are_left_out_need_no_group(tmp_path):
    top = write_patients(tmp_path)
    files = data.folder(str(top), folds=3).train.files
    (top / "ill" / "broken.png").write_bytes(b"<html>404</html>")
    (top / "patients.csv").write_text("".join(f"{file},{file[-7:-6]}\n" for file in [*files, "ill/broken.png"]))
    for option in ({"group_by": r"(p\d)_\d+"}, {"groups": "patients.csv"}):
        assert len(data.folder(str(top), folds=3, skip_broken=True, **option).groups.unique()) == 6
        data.folder.cache_clear()
    assert "does not match ill/broken.png" in error_of(top, folds=3, group_by=r"(p\d)_\d+")
    (top / "ill" / "other.png").write_bytes((top / "ill" / "p0_0.png").read_bytes())
    assert "does not match ill/other.png;" in error_of(top, folds=3, group_by=r"(p\d)_\d+", skip_broken=True)
    assert "no regular expression" in error_of(top, folds=3, group_by=r"(p\d", skip_broken=True)


def test_a_group_for_every_image_is_noted(tmp_path):
    top = write_patients(tmp_path)
    _, notes = load(top, folds=3, group_by=r"(p\d_\d+)")
    assert not notes  # p0_0 lies in both classes
    _, notes = load(top, folds=2, test=None, group_by=r"(.*)")
    assert not notes
    for path in top.glob("well/*.png"):
        path.rename(path.with_name(f"w{path.name}"))
    _, (text,) = load(top, folds=3, group_by=r"(.*)")
    assert 'group_by=r"(.*)" gives each of the 24 images a group of its own; expected some images in one group' in text


def test_group_in_training_and_test_folder_is_an_error_that_names_it(tmp_path):
    for i, split in enumerate(("train", "test")):
        for name in ("ill", "well"):
            (tmp_path / split / name).mkdir(parents=True)
            for patient in range(3):
                Image.fromarray(noise()).save(tmp_path / split / name / f"p{patient + 3 * i}_0.png")
    dataset = data.folder(str(tmp_path), group_by=r"(.*)_\d+")
    assert dataset.groups.unique().tolist() == [0, 1, 2] and dataset.test_groups.unique().tolist() == [3, 4, 5]
    (tmp_path / "test" / "ill" / "p3_0.png").rename(tmp_path / "test" / "ill" / "p1_1.png")
    assert "train and test both have images of p1;" in error_of(tmp_path, group_by=r"(.*)_\d+")
