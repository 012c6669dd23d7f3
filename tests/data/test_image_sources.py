"""Folders, archives and data sets of pictures give back the pixels that were put in; a bad one is named in a line."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from pictures_made import everything, plant, png, tar, zipped

from command_inputs import noise
from maskless.data.image_files import UNLABELLED, Tar, Zip
from maskless.data.image_pixels import decode, fit
from maskless.data.images import looks_like_images, read_images

TINY_IMAGENET = Path(__file__).resolve().parents[3] / "shared" / "data" / "images" / "tiny-imagenet-40.tar.xz"


def split_tree() -> dict[str, bytes]:
    """Three classes, not planted in their order, with a validation split that lacks one, and things to ignore."""
    files = {}
    for split, classes in (("val", "ac"), ("train", "cab")):
        for name in classes:
            files |= {f"{split}/{name}/{i}.png": png(noise(4, 4, 3, seed=ord(name) + i)) for i in range(2)}
    return dict(sorted(files.items())) | {"README.md": b"words", "train/.hidden.png": b"", "__MACOSX/a.png": b""}


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


def names(folder: Path) -> list[str]:
    return [entry.where.removeprefix(f"{folder}/") for _, entry in read_images([folder]).entries()]


@pytest.mark.parametrize("links", [{"a/up": ".."}, {"a/b": "../b", "b/a": "../a"}, {"b/far": "../../far"}], ids=str)
def test_links_in_a_circle_bring_no_picture_twice(tmp_path, links):
    """They brought each picture up to forty times, into both sides of the split."""
    files = {f"data/{name}/{i}.png": png(noise(4, 4, 3)) for name in "ab" for i in range(3)}
    plant(tmp_path, files | {"far/0.png": png(noise(4, 4, 3))})
    folder = tmp_path / "data"
    for link, to in links.items():
        (folder / link).symlink_to(to)
    (tmp_path / "far" / "back").symlink_to(folder)
    wanted = 7 if "b/far" in links else 6
    assert len({(folder / name).resolve() for name in names(folder)}) == len(names(folder)) == wanted
    assert read_images([folder]).total == wanted


def test_links_make_up_a_split(tmp_path):
    """Of folders that lie beside it, or hidden; the folders themselves are no part of the data then."""
    square = png(noise(4, 4, 3))
    folder = plant(tmp_path / "data", {f"{name}.png": square for name in ("all/one/0", "all/two/1", ".raw/2")})
    for link, to in {"train/a": "../all/one", "val/a": "../all/two", "train/b": "../.raw"}.items():
        (folder / link).parent.mkdir(exist_ok=True)
        (folder / link).symlink_to(to)
    assert names(folder) == ["train/a/0.png", "train/b/2.png", "val/a/1.png"]
    assert read_images([folder]).counts == {"train": 2, "valid": 1}


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


def squares(inputs: list, size: int, **how) -> list[np.ndarray]:
    return [square for square, _, _ in read_images(inputs).pictures(size, **how)]


def test_broken_pictures_are_left_out_and_named(tmp_path):
    good = [noise(4, 4, 3, seed=i) for i in range(3)]
    files = {f"{i}.png": png(pixels) for i, pixels in enumerate(good)} | {"0b.jpg": b"", "1b.png": png(good[0])[:40]}
    plant(tmp_path, files)
    lines: list[str] = []
    found = squares([tmp_path], 4, on_broken=lines.append)
    assert np.array_equal(found, good)
    assert lines[0] == f"{tmp_path}/0b.jpg: the file is empty"
    assert lines[1].startswith(f"{tmp_path}/1b.png: ")
    with pytest.raises(ValueError, match=r"none of 1 pictures can be read; .*0b\.jpg: the file is empty"):
        squares([tmp_path / "0b.jpg"], 4)


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


@pytest.mark.parametrize("kind", ["a.tar.xz", "a.zip", "a.npz"])
def test_an_archive_that_cannot_be_opened_is_not_called_broken(tmp_path, kind):
    (tmp_path / kind).symlink_to(tmp_path / "nowhere")
    archive = Tar if "tar" in kind else Zip
    with pytest.raises(FileNotFoundError):
        list(archive(tmp_path / kind).walk())


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


def test_each_side_has_its_own_pictures(tmp_path):
    pixels = noise(20, 4, 4, 3)
    plant(tmp_path, {f"{'ab'[i // 10]}/{i:02}.png": png(p) for i, p in enumerate(pixels)} | {"a/05.png": b""})
    train, valid = (squares([tmp_path], 4, split=split, valid=0.25) for split in ("train", "valid"))
    assert (len(train), len(valid)) == (14, 5)  # the broken one is for training
    assert not {p.tobytes() for p in train} & {p.tobytes() for p in valid}
    for wrong, why in (({"size": 0}, "size is 0"), ({"size": 4, "filter": "x"}, "filter 'x': expected bilinear")):
        with pytest.raises(ValueError, match=why):
            squares([tmp_path], **wrong)


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
