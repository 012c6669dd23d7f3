"""Packed files: what they hold comes in small stretches, and a file that holds suspiciously much is refused."""

import gzip
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
from packed_made import PACKERS
from pictures_made import plant, png, tar, zipped

from command_inputs import noise
from maskless.data import image_files, unpack
from maskless.data.images import looks_like_images, read_images
from maskless.data.sources import read
from maskless.data.unpack import InputLimits, in_bytes, in_words

PICTURES = {f"{name}/{n}.png": png(noise(4, 4, 3, seed=n)) for name in "ab" for n in range(5)}
SPACE = bytes(200_000)


def idx(path: Path, count: int) -> Path:
    with gzip.open(path, "wb") as file:
        file.write(b"\0\0\x08\x03" + struct.pack(">3I", count, 40, 40) + bytes(1600 * count))
    return path


def arrays(path: Path, count: int) -> Path:
    np.savez_compressed(path, images=np.zeros((count, 40, 40), np.uint8))
    return path


def text(path: Path, characters: int) -> Path:
    words = "a word " * (characters // 7)
    data = f'{{"text": "{words}"}}\n' if ".jsonl" in path.name else words
    path.write_bytes(PACKERS[path.suffix](data.encode()))
    return path


TRAPS = {
    **{f"a.txt{suffix}": lambda path: text(path, 200_000) for suffix in PACKERS},
    **{f"a.jsonl{suffix}": lambda path: text(path, 200_000) for suffix in PACKERS},
    "a.tar.gz": lambda path: tar(path, PICTURES | {"a/9.png": SPACE}),
    "a.tar.xz": lambda path: tar(path, PICTURES | {"notes.txt": SPACE}),
    "a.tar.bz2": lambda path: tar(path, PICTURES | {"b/.hidden": SPACE}),
    "a.zip": lambda path: zipped(path, PICTURES | {"a/9.png": SPACE}),
    "train-images-idx3-ubyte.gz": lambda path: idx(path, 125),
    "a.npz": lambda path: arrays(path, 125),
}


def read_all(path: Path, limits: InputLimits = unpack.LIMITS) -> int:
    if path.name.startswith(("a.txt", "a.jsonl")):
        return sum(len(chunk.text) for chunk in read([path], limits=limits))
    return sum(1 for _ in read_images([path], limits).pictures(4))


@pytest.mark.parametrize("name", TRAPS)
def test_a_file_that_holds_a_hundred_times_its_size_is_refused_unless_it_is_allowed_to(tmp_path, monkeypatch, name):
    path = TRAPS[name](tmp_path / name)
    monkeypatch.setattr(unpack, "FLOOR", 100_000)
    monkeypatch.setattr(unpack, "RATIO", 10)
    says = rf"{name}: it unpacks to more than 100 kB; .* `maskless prepare --max-unpacked`"
    with pytest.raises(ValueError, match=says):
        read_all(path)
    with pytest.raises(ValueError, match="more than 150 kB"):
        read_all(path, InputLimits(unpacked=150_000))
    assert read_all(path, InputLimits(unpacked=300_000)) > 0
    monkeypatch.setattr(unpack, "RATIO", 10_000)
    assert read_all(path) > 0


def test_a_tar_that_is_not_packed_has_no_such_limit(tmp_path):
    assert read_all(tar(tmp_path / "a.tar", PICTURES | {"a/9.png": SPACE}), InputLimits(unpacked=1)) == len(PICTURES)


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_text_that_is_all_alike_comes_in_small_stretches(tmp_path, suffix):
    """A block of 64 kB of an .xz file can hold half a gigabyte."""
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(PACKERS[suffix](b" " * 40_000_000))
    with path.open("rb") as raw:
        blocks = list(map(len, unpack.unpacked(path, raw, InputLimits())))
    assert sum(blocks) == 40_000_000
    assert max(blocks) < 30_000_000


@pytest.mark.parametrize("kind", ["folder", "a.tar.xz", "a.zip"])
def test_a_file_that_is_too_long_for_a_picture_is_left_out_like_a_broken_one(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(image_files, "AT_ONCE", 100_000)
    files = PICTURES | {"a/9.png": SPACE}
    make = {"folder": plant, "a.tar.xz": tar, "a.zip": zipped}[kind]
    broken: list[str] = []
    found = list(read_images([make(tmp_path / kind, files)]).pictures(4, on_broken=broken.append))
    assert len(found) == len(PICTURES)
    assert broken == [f"{tmp_path / kind}/a/9.png: longer than 100 kB, which no picture is"]


def test_a_header_of_a_tar_is_not_read_if_it_is_huge(tmp_path, monkeypatch):
    monkeypatch.setattr(unpack, "AT_ONCE", 100_000)
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, 200_000
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(header.tobuf() + bytes(300_000)))
    with pytest.raises(ValueError, match=r"a.tar.gz: a part of it says that it has 200,\d+ bytes"):
        looks_like_images([path])


def test_arrays_of_huge_pictures_are_named(tmp_path):
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(b"\0\0\x08\x03" + struct.pack(">3I", 2, 1 << 31, 1 << 31))
    with pytest.raises(ValueError, match=r"ubyte: pictures of 4,611,686,018,427,387,904 bytes, expected"):
        read_all(path)


def test_sizes_are_read_and_told_as_one_writes_them():
    said = {"500MB": 500_000_000, "64 GB": 64 * 10**9, "1.5t": 1_500_000_000_000, "7k": 7000, "123": 123}
    assert {text: in_bytes(text) for text in said} == said
    told = {7: "7 bytes", 1500: "1.5 kB", 256 * 10**6: "256 MB", 10**9: "1 GB", 4 * 10**12: "4,000 GB"}
    assert {size: in_words(size) for size in told} == told
    for wrong in ("", "much", "-1GB", "0", "GB", "1 GiB", "1e9", "nan"):
        with pytest.raises(ValueError, match="is no size: expected a number of bytes such as 500MB or 64GB"):
            in_bytes(wrong)
