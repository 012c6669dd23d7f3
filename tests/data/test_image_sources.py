"""Pictures: every kind of input gives back the pixels that were put in, and every bad one is named in a line."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
import zipfile
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from maskless.data.image_arrays import CIFAR
from maskless.data.image_files import UNLABELLED, Tar
from maskless.data.image_pixels import decode, fit
from maskless.data.images import image_array, images_in, looks_like_images, read_images

TINY_IMAGENET = Path(__file__).resolve().parents[3] / "shared" / "data" / "images" / "tiny-imagenet-40.tar.xz"


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def encoded(image: Image.Image, kind: str = "png", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png(pixels: np.ndarray) -> bytes:
    return encoded(Image.fromarray(pixels))


def plant(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def tar(path: Path, files: dict[str, bytes], prefix: str = "") -> Path:
    with tarfile.open(path, f"w:{path.suffix[1:] if path.suffix != '.tar' else ''}") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(prefix + name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def zipped(path: Path, files: dict[str, bytes], prefix: str = "") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(prefix + name, data)
    return path


def everything(*inputs: object) -> list[tuple[bytes, int, str]]:
    """(pixels, label, side) of each picture, at the size it has."""
    return [(entry.load().tobytes(), entry.label, side) for side, entry in read_images(inputs).entries()]


def split_tree() -> dict[str, bytes]:
    """Three classes, not planted in their order, with a validation split that lacks one, and things to ignore."""
    files = {}
    for split, classes in (("val", "ac"), ("train", "cab")):
        for name in classes:
            files |= {f"{split}/{name}/{i}.png": png(noise(4, 4, 3, seed=ord(name) + i)) for i in range(2)}
    return dict(sorted(files.items())) | {"README.md": b"words", "train/.hidden.png": b"", "__MACOSX/a.png": b""}


# One picture


@pytest.mark.parametrize(("filter", "resample"), [("bilinear", Image.BILINEAR), ("bicubic", Image.BICUBIC)])
@pytest.mark.parametrize(
    ("shape", "resized", "left", "top"),
    [((30, 50), (26, 16), 5, 0), ((12, 10), (16, 19), 0, 2), ((10, 12), (19, 16), 2, 0), ((9, 12), (21, 16), 2, 0)],
)
def test_fit_is_a_resize_of_the_shorter_side_and_a_centre_crop(filter, resample, shape, resized, left, top):
    pixels = noise(*shape, 3)
    reference = Image.fromarray(pixels).resize(resized, resample).crop((left, top, left + 16, top + 16))
    assert np.array_equal(fit(pixels, 16, filter), np.asarray(reference))
    grey = Image.fromarray(pixels[..., 0]).resize(resized, resample).crop((left, top, left + 16, top + 16))
    assert np.array_equal(fit(pixels[..., 0], 16, filter), np.stack([np.asarray(grey)] * 3, -1))
    assert np.array_equal(fit(pixels[..., 0], 16, filter, channels=1)[..., 0], np.asarray(grey))


def test_a_square_of_the_right_size_is_left_as_it_is():
    assert np.array_equal(fit(noise(16, 16, 3), 16), noise(16, 16, 3))


def test_reducing_averages_all_pixels():
    """Antialiased: a fine checkerboard becomes grey, where taking every fourth pixel would give black."""
    board = (np.indices((64, 64)).sum(0) % 2 * 255).astype(np.uint8)
    assert np.abs(fit(board, 16).astype(int) - 127).max() <= 8


def test_all_modes_become_what_they_show():
    rgb, grey = noise(6, 5, 3), noise(6, 5)
    assert np.array_equal(decode(png(rgb)), rgb)
    assert np.array_equal(decode(png(grey)), grey)
    bits = Image.fromarray(grey).convert("1")
    assert np.array_equal(decode(encoded(bits)), np.asarray(bits) * 255)
    palette = Image.fromarray(rgb).quantize(16)
    assert np.array_equal(decode(encoded(palette)), np.asarray(palette.convert("RGB")))
    cmyk = encoded(Image.fromarray(np.full((8, 8, 3), (200, 30, 60), np.uint8)).convert("CMYK"), "jpeg", quality=100)
    assert np.abs(decode(cmyk).astype(int) - (200, 30, 60)).max() <= 6
    alpha = np.dstack([rgb, np.full((6, 5), 255, np.uint8)])
    alpha[0, :, 3] = 0
    assert np.array_equal(decode(png(alpha))[1:], rgb[1:])
    assert (decode(png(alpha))[0] == 255).all()  # nothing there: white
    assert (decode(png(np.stack([grey, np.zeros_like(grey)], -1))) == 255).all()


def test_sixteen_bits_become_eight_by_rounding():
    levels = np.array([[0, 128, 129, 257, 65535 - 129, 65535]], np.uint16)
    assert decode(encoded(Image.fromarray(levels))).tolist() == [[0, 0, 1, 1, 254, 255]]
    assert decode(encoded(Image.fromarray(levels), "tiff")).tolist() == [[0, 0, 1, 1, 254, 255]]


def test_a_picture_is_turned_upright():
    pixels = noise(4, 6, 3)
    exif = Image.Exif()
    exif[0x0112] = 6  # a camera held on its side
    assert np.array_equal(decode(encoded(Image.fromarray(pixels), exif=exif)), np.rot90(pixels, -1))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_broken_pictures_say_why(monkeypatch):
    whole = encoded(Image.fromarray(noise(64, 64, 3)), "jpeg")
    for data, why in ((b"", "empty"), (b"words", "not a picture"), (whole[:700], "truncated|broken")):
        with pytest.raises(ValueError, match=why):
            decode(data)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    for side, why in ((40, "40x40 pixels: above"), (60, "exceeds limit")):  # a warning and an error of Pillow's
        with pytest.raises(ValueError, match=why):
            decode(png(noise(side, side, 3)))
    with pytest.raises(ValueError, match="too narrow"):
        fit(np.zeros((1, 60_000), np.uint8), 256)


# Folders and archives


def test_classes_are_sorted_and_splits_are_the_folders(tmp_path):
    images = read_images([plant(tmp_path / "data", split_tree())])
    assert images.names == ("data",)
    assert images.classes == ("a", "b", "c")
    assert images.counts == {"train": 6, "valid": 4}
    expected = [
        (png_, "abc".index(c), s) for s, cs in (("train", "abc"), ("valid", "ac")) for c in cs for png_ in (0, 1)
    ]
    pixels = [noise(4, 4, 3, seed=ord("abc"[label]) + i).tobytes() for i, label, _ in expected]
    found = everything(tmp_path / "data")
    assert found == [(data, label, side) for data, (_, label, side) in zip(pixels, expected, strict=True)]


@pytest.mark.parametrize("kind", ["a.tar", "a.tar.gz", "a.tar.xz", "a.zip"])
@pytest.mark.parametrize("prefix", ["", "./", "tiny/"])
def test_an_archive_equals_its_folder(tmp_path, kind, prefix):
    folder = plant(tmp_path / "data", split_tree())
    make = zipped if kind.endswith("zip") else tar
    archive = make(tmp_path / kind, split_tree(), prefix)
    assert everything(archive) == everything(folder)
    assert read_images([archive]).classes == ("a", "b", "c")
    assert looks_like_images([archive])
    assert {path.name for path in tmp_path.iterdir()} == {"data", kind}  # nothing was unpacked


def test_classes_without_splits_and_pictures_without_classes(tmp_path):
    square = png(noise(4, 4, 3))
    for name, files, classes in (
        ("classes", {"test/a.png": square, "good/b.png": square}, ("good", "test")),
        ("one", {"cats/a.png": square}, ("cats",)),
        ("flat", {"a.png": square, "b.png": square}, ()),
        ("train", {"train/a/1.png": square, "train/b/2.png": square}, ("a", "b")),
        ("held", {"val/a/1.png": square, "val/b/2.png": square}, ("a", "b")),
        ("both", {"train/a/1.png": square, "val/a/1.png": square, "test/x/1.png": square}, ("a",)),
    ):
        images = read_images([plant(tmp_path / name, files)])
        assert images.classes == classes
        assert images.counts == ({"train": 1, "valid": 1} if name == "both" else {None: len(files)})
        assert all((entry.label == UNLABELLED) == (classes == ()) for _, entry in images.entries())


def test_a_share_is_held_out_of_each_class_where_no_split_is_given(tmp_path):
    folder = plant(tmp_path, {f"{c}/{i:02}.png": png(noise(2, 2)) for c in "ab" for i in range(40)})
    sides = [(side, entry.label) for side, entry in read_images([folder]).entries(valid=0.1)]
    assert [sides.count(("valid", label)) for label in (0, 1)] == [4, 4]


def test_inputs_are_put_together_by_the_names_of_their_classes(tmp_path):
    one = plant(tmp_path / "one", {f"{c}/1.png": png(noise(2, 2)) for c in "bd"})
    two = plant(tmp_path / "two", {f"{c}/1.png": png(noise(2, 2)) for c in "abd"})
    images = read_images([one, two])
    assert images.classes == ("b", "d", "a")
    assert [entry.label for _, entry in images.entries()] == [0, 1, 2, 0, 1]


def test_broken_pictures_are_left_out_and_named(tmp_path):
    good = [noise(4, 4, 3, seed=i) for i in range(3)]
    files = {f"{i}.png": png(pixels) for i, pixels in enumerate(good)} | {"0b.jpg": b"", "1b.png": png(good[0])[:40]}
    plant(tmp_path, files)
    lines: list[str] = []
    found = list(images_in([tmp_path], 4, on_broken=lines.append))
    assert np.array_equal(found, good)
    assert lines[0] == f"{tmp_path}/0b.jpg: the file is empty"
    assert lines[1].startswith(f"{tmp_path}/1b.png: ")
    with pytest.raises(ValueError, match=r"none of 1 pictures can be read; .*0b\.jpg: the file is empty"):
        list(images_in([tmp_path / "0b.jpg"], 4))


@pytest.mark.parametrize("kind", ["data", "a.tar", "a.zip"])
def test_threads_change_nothing(tmp_path, kind):
    files = {f"{i:02}.png": b"" if i % 7 == 0 else png(noise(9, 8, 3, seed=i)) for i in range(40)}
    make = {"data": plant, "a.tar": tar, "a.zip": zipped}[kind]
    images = read_images([make(tmp_path / kind, files)])
    lines: dict[int, list[str]] = {1: [], 3: []}
    one, three = ([p for p, _, _ in images.pictures(8, workers=n, on_broken=lines[n].append)] for n in (1, 3))
    assert np.array_equal(one, three)
    assert lines[1] == lines[3]
    assert (len(one), len(lines[1])) == (34, 6)


def test_bad_trees_are_named(tmp_path):
    square = png(noise(4, 4))
    for name, files, why in (
        ("empty", {}, "no pictures"),
        ("text", {"a.txt": b"words"}, "no pictures; expected files that end in .jpg"),
        ("mixed", {"a.png": square, "cats/b.png": square}, "both beside and in the folders"),
        ("unknown", {"train/a/1.png": square, "val/z/1.png": square}, "'z', which its train split does not have"),
        ("bare", {"train/a/1.png": square, "val/1.png": square}, "outside the folders of classes, which"),
        ("pickled", {"data_batch_1": b"", "test_batch": b""}, "binary version"),
    ):
        (tmp_path / name).mkdir()
        with pytest.raises(ValueError, match=why):
            read_images([plant(tmp_path / name, files)])
    (tmp_path / "broken.tar.xz").write_bytes(tar(tmp_path / "a.tar.xz", split_tree()).read_bytes()[:-100])
    (tmp_path / "broken.zip").write_bytes(b"PK")
    (tmp_path / "broken.tgz").write_bytes(b"words")
    for given, why in (
        (tmp_path / "broken.tar.xz", "broken or cut off"),
        (tmp_path / "broken.zip", "broken or cut off"),
        (tmp_path / "broken.tgz", "broken or cut off"),
        (tmp_path / "nowhere", "no such file or folder"),
        (tmp_path / "text" / "a.txt", "no pictures in this kind of file"),
    ):
        with pytest.raises(ValueError, match=why) as caught:
            everything(given)
        assert "\n" not in str(caught.value)
    flat = plant(tmp_path / "flat", {"a.png": square})
    with pytest.raises(ValueError, match="flat: pictures without classes, though"):
        read_images([flat, plant(tmp_path / "classes", {"a/a.png": square})])
    with pytest.raises(ValueError, match="no input"):
        read_images([])


# Arrays


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.mark.parametrize("gz", [False, True])
def test_idx_files_give_back_their_pictures(tmp_path, gz):
    pixels, labels = noise(8, 4, 6), np.array([0, 1, 2, 3, 4, 4, 1, 0], np.uint8)
    expected = []
    for prefix, side, part in (("train", "train", slice(5)), ("t10k", "valid", slice(5, 8))):
        for what, array in (("images-idx3", pixels[part]), ("labels-idx1", labels[part])):
            data = idx_bytes(array)
            plant(tmp_path, {f"{prefix}-{what}-ubyte{'.gz' * gz}": gzip.compress(data) if gz else data})
        expected += [(p.tobytes(), label, side) for p, label in zip(pixels[part], labels[part], strict=True)]
    assert sorted(everything(tmp_path)) == sorted(expected)
    assert [found for found in everything(tmp_path) if found[2] == "train"] == expected[:5]  # in their order
    images = read_images([tmp_path])
    assert images.classes == ("0", "1", "2", "3", "4")
    assert images.counts == {"train": 5, "valid": 3}
    one = read_images([tmp_path / f"train-images-idx3-ubyte{'.gz' * gz}"])
    assert (one.counts, len(one.classes)) == ({None: 5}, 5)
    assert looks_like_images([tmp_path])


def test_bad_idx_files_are_named(tmp_path):
    images, labels = idx_bytes(noise(5, 4, 4)), idx_bytes(np.arange(5, dtype="u1"))
    for name, first, second, why in (
        ("cut", images[:-1], labels, r"images-idx3-ubyte: .*cut off \(4 of 5 pictures"),
        ("header", images[:9], labels, "images-idx3-ubyte: .*cut off"),
        ("magic", b"\0\0\x0d\x03" + images[4:], labels, "begins with 00000d03"),
        ("labels", images, labels[:-1], "labels-idx1-ubyte: .*4 of 5 labels"),
        ("unequal", images, idx_bytes(np.arange(4, dtype="u1")), "5 pictures, but 4 labels"),
        ("none", idx_bytes(noise(0, 4, 4)), idx_bytes(np.arange(0, dtype="u1")), "no pictures"),
    ):
        folder = plant(tmp_path / name, {"train-images-idx3-ubyte": first, "train-labels-idx1-ubyte": second})
        with pytest.raises(ValueError, match=why):
            everything(folder)
    (tmp_path / "cut" / "train-images-idx3-ubyte").rename(tmp_path / "cut" / "x-images-idx3-ubyte.gz")
    (tmp_path / "cut" / "x-images-idx3-ubyte.gz").write_bytes(gzip.compress(images)[:-20])
    with pytest.raises(ValueError, match="broken or cut off"):
        everything(tmp_path / "cut" / "x-images-idx3-ubyte.gz")


def cifar_files(kind: str, labels: list[int]) -> tuple[dict[str, bytes], np.ndarray]:
    """Nine pictures in two batches and a test batch of three."""
    pixels, wanted = noise(9, 32, 32, 3), [labels[:3], labels[3:6], labels[6:]]
    names = ("data_batch_1", "data_batch_2", "test_batch")
    batches = dict(zip(names, (pixels[:3], pixels[3:6], pixels[6:]), strict=True))
    if kind == "png":
        files = {f"{name}.png": png(batch.reshape(3, 1024, 3)) for name, batch in batches.items()}
        lists = {"train_lables.json": labels[:6], "test_lables.json": labels[6:]}
        return files | {name: json.dumps(values).encode() for name, values in lists.items()}, pixels
    planes = {name: batch.transpose(0, 3, 1, 2).reshape(3, 3072) for name, batch in batches.items()}
    records = [np.column_stack([np.array(y, np.uint8), x]) for y, x in zip(wanted, planes.values(), strict=True)]
    return {f"{name}.bin": r.tobytes() for name, r in zip(names, records, strict=True)}, pixels


@pytest.mark.parametrize("kind", ["png", "bin"])
def test_cifar_gives_back_its_pictures(tmp_path, kind):
    labels = [6, 9, 0, 4, 1, 1, 3, 8, 8]
    files, pixels = cifar_files(kind, labels)
    folder = plant(tmp_path / "cifar", files)
    sides = ["train"] * 6 + ["valid"] * 3
    expected = [(p.tobytes(), label, side) for p, label, side in zip(pixels, labels, sides, strict=True)]
    assert everything(folder) == expected
    assert everything(tar(tmp_path / "package.tar.gz", files, "package/").rename(tmp_path / "p.tgz")) == expected
    assert read_images([folder]).classes == CIFAR
    assert looks_like_images([folder])


@pytest.mark.parametrize("kind", ["png", "bin"])
def test_bad_cifar_is_named(tmp_path, kind):
    files, _ = cifar_files(kind, [0, 1, 2, 10, 4, 5, 6, 7, 8])
    with pytest.raises(ValueError, match=f"data_batch_2.{kind}: picture 0 has the label 10, expected 0 to 9"):
        read_images([plant(tmp_path / "label", files)])
    files, _ = cifar_files(kind, list(range(9)))
    cut = {name: data[: len(data) // 2] if name == f"data_batch_1.{kind}" else data for name, data in files.items()}
    with pytest.raises(ValueError, match=f"data_batch_1.{kind}"):
        everything(plant(tmp_path / "cut", cut))
    if kind == "png":
        with pytest.raises(ValueError, match=r"train_lables\.json: 2 labels, but 6 pictures"):
            read_images([plant(tmp_path / "few", files | {"train_lables.json": b"[1, 2]"})])


def test_numpy_arrays_give_back_their_pictures(tmp_path):
    x, y = noise(5, 4, 6, 3), np.array([[2], [0], [1], [2], [2]])
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x[:2], y_test=y[:2])
    np.savez_compressed(tmp_path / "b.npz", images=x.transpose(0, 3, 1, 2), labels=y[:, 0].astype(np.uint8))
    np.save(tmp_path / "c.npy", x[..., 0])
    expected = [(p.tobytes(), int(label)) for p, label in zip(x, y[:, 0], strict=True)]
    found = everything(tmp_path / "a.npz")
    assert [f[:2] for f in found] == expected + expected[:2]
    assert [f[2] for f in found] == ["train"] * 5 + ["valid"] * 2
    assert [f[:2] for f in everything(tmp_path / "b.npz")] == expected
    assert read_images([tmp_path / "b.npz"]).classes == ("0", "1", "2")
    assert [f[:2] for f in everything(tmp_path / "c.npy")] == [(p.tobytes(), UNLABELLED) for p in x[..., 0]]
    for name, array in (("images", x), ("labels", y)):
        (tmp_path / "folder").mkdir(exist_ok=True)
        np.save(tmp_path / "folder" / f"{name}.npy", array)
    assert [f[:2] for f in everything(tmp_path / "folder")] == expected


def test_bad_numpy_arrays_are_named(tmp_path):
    x = noise(5, 4, 6, 3)
    for arrays, why in (
        ({"a": x}, "it has a; expected arrays called images"),
        ({"images": x, "labels": np.arange(4)}, "5 pictures, but 4 labels"),
        ({"images": x, "labels": np.arange(5) - 1}, "picture 0 has the label -1"),
        ({"images": x, "labels": np.arange(5) / 2}, "float64 .*expected whole numbers"),
        ({"images": x / 255}, "float64 of shape .* expected uint8"),
        ({"images": x[..., :2]}, r"shape \(5, 4, 6, 2\)"),
        ({"images": x[0, 0]}, "expected uint8"),
        ({"images": np.array([x[0], x[0, 0]], dtype=object)}, "object .*expected uint8"),
        ({"images": x, "labels": np.array([1, None, 2, 3, 4])}, "labels.npy: not an array of labels .*allow_pickle"),
    ):
        np.savez(tmp_path / "a.npz", **arrays)
        with pytest.raises(ValueError, match=why):
            read_images([tmp_path / "a.npz"])
    np.save(tmp_path / "b.npy", x)
    (tmp_path / "b.npy").write_bytes((tmp_path / "b.npy").read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"b\.npy: .*4 of 5 pictures"):
        everything(tmp_path / "b.npy")


def test_a_hugging_face_data_set_gives_back_its_pictures(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "ape"])})
    for split, labels in (("train", [1, 0, 1]), ("test", [0])):
        cells = [{"bytes": png(noise(4, 4, 3, seed=i)), "path": None} for i in range(len(labels))]
        cells[1:2] = [{"bytes": b"broken", "path": None}] * (len(labels) > 1)
        data = datasets.Dataset.from_dict({"img": cells, "label": labels}, features=features)
        data.to_parquet(tmp_path / f"{split}.parquet")
    given = f"hf:{tmp_path}"
    lines: list[str] = []
    images = read_images([given])
    found = [(p.tobytes(), label, side) for p, label, side in images.pictures(4, on_broken=lines.append)]
    assert images.classes == ("cat", "ape")
    assert images.counts == {"train": 3, "valid": 1}
    pixels = [noise(4, 4, 3, seed=i).tobytes() for i in range(3)]
    assert found == [(pixels[0], 1, "train"), (pixels[2], 1, "train"), (pixels[0], 0, "valid")]
    assert lines == [f"hf:{tmp_path}, train picture 1: not a picture that Pillow can read"]
    assert looks_like_images([given])
    datasets.Dataset.from_dict({"text": ["words"]}).to_parquet(tmp_path / "text" / "train.parquet")
    assert not looks_like_images([f"hf:{tmp_path}/text"])
    with pytest.raises(ValueError, match="no column of images, it has text"):
        read_images([f"hf:{tmp_path}/text"])


# For codecs and statistics


def test_an_array_of_n_is_spread_evenly_and_mends_gaps(tmp_path):
    pixels = noise(20, 4, 4, 3)
    files = {f"{'ab'[i // 10]}/{i:02}.png": png(p) for i, p in enumerate(pixels)}
    found, labels = image_array([plant(tmp_path, files)], 4, 4)
    assert np.array_equal(found, pixels[[0, 5, 10, 15]])
    assert labels.tolist() == [0, 0, 1, 1]
    plant(tmp_path, {"a/05.png": b""})
    found, labels = image_array([tmp_path], 4, 4)
    assert np.array_equal(found, pixels[[0, 6, 10, 15]])
    assert len(image_array([tmp_path], 4)[0]) == 19
    sides = {split: image_array([tmp_path], 4, split=split, valid=0.25)[0] for split in ("train", "valid")}
    assert [len(side) for side in sides.values()] == [14, 5]  # the broken one is for training
    assert not {p.tobytes() for p in sides["train"]} & {p.tobytes() for p in sides["valid"]}
    for n, why in ((0, "n is 0: expected 1 to 20"), (21, "n is 21"), (20, "only 19 can be read")):
        with pytest.raises(ValueError, match=why):
            image_array([tmp_path], 4, n)
    for wrong, why in (({"size": 0}, "size is 0"), ({"size": 4, "filter": "x"}, "filter 'x': expected bilinear")):
        with pytest.raises(ValueError, match=why):
            list(images_in([tmp_path], **wrong))


def test_text_does_not_look_like_pictures(tmp_path):
    folder = plant(tmp_path / "texts", {"a.txt": b"words", "b.md": b"words", "logo.png": png(noise(2, 2))})
    assert not looks_like_images([folder])
    assert not looks_like_images([folder / "a.txt", "lm1b", tmp_path / "nowhere"])
    assert looks_like_images([plant(folder, {"b.png": b"", "c.png": b""})])
    assert looks_like_images([folder / "logo.png"])


@pytest.mark.skipif(not TINY_IMAGENET.exists(), reason="the archive is not committed")
def test_real_pictures_come_out_of_an_archive():
    assert looks_like_images([TINY_IMAGENET])
    pictures = (decode(read()) for _, read in islice(Tar(TINY_IMAGENET).each(), 100))
    assert {fit(pixels, 32).shape for pixels in pictures} == {(32, 32, 3)}
