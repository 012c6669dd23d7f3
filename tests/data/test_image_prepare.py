"""Prepared pictures: the rows are what the codec says, mirrored ones follow, and nothing half-written is left."""

import json
import os
import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from command_inputs import noise
from maskless.codec.vq import VQ, PixelCodec, VQConfig, to_images
from maskless.data.image_pixels import fit
from maskless.data.image_prepare import prepare_images
from maskless.data.image_tokens import holds_images, open_images
from maskless.data.images import read_images
from maskless.data.tokens import INDEX, global_batch, open_tokens

SIZE = 8


class Mean:
    """A codec without weights: a token is the mean level of the pixels that it covers, of 0 to codes - 1."""

    channels = 3

    def __init__(self, codes: int = 60, factor: int = 4, wrong: int = 0) -> None:
        self.codes, self.factor, self.wrong, self.batches = codes, factor, wrong, list[int]()

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        self.batches.append(len(images))
        levels = torch.nn.functional.avg_pool2d(images.mean(1), self.factor)
        return ((levels + 1) / 2 * (self.codes - 1)).round().long() + self.wrong

    def save(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"codes": self.codes}))


def pixels(count: int) -> np.ndarray:
    return noise(count, 12, 10, 3)


@pytest.fixture
def folder(tmp_path) -> Path:
    """train: 6 of a, 5 of b; val: 2 of b."""
    pictures = iter(pixels(13))
    for place, count in (("train/a", 6), ("train/b", 5), ("val/b", 2)):
        (tmp_path / "data" / place).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(next(pictures)).save(tmp_path / "data" / place / f"{i}.png")
    return tmp_path / "data"


def direct(codec, pictures: np.ndarray) -> torch.Tensor:
    """(N, H, W, 3) -> (N, L), one picture at a time"""
    squares = [torch.from_numpy(fit(p, SIZE))[None] for p in pictures]
    tokens = torch.cat([codec.encode(to_images(square)).flatten(1) for square in squares])
    return torch.nn.functional.pad(tokens, (1, 0), value=codec.codes + 1)


@pytest.mark.parametrize(
    "make", [Mean, lambda: VQ(VQConfig(codes=16, code_width=4, latent=8, width=32, multipliers=(1, 1), blocks=1))]
)
def test_rows_are_what_the_codec_makes_of_each_picture(folder, tmp_path, make):
    torch.manual_seed(0)
    codec = make()
    prepared = prepare_images([folder], tmp_path / "out", codec, size=SIZE, batch=4)
    train, valid = prepared.split("train"), prepared.split("valid")
    assert torch.equal(train.rows(range(11)), direct(codec, pixels(13)[:11]))
    assert torch.equal(valid.rows([1, 0]), direct(codec, pixels(13)[11:])[[1, 0]])
    assert train.rows([0]).dtype == torch.int64
    assert train.labels(range(11)).tolist() == [0] * 6 + [1] * 5
    assert valid.labels([0, 1]).tolist() == [1, 1]
    assert (train.rows(range(11))[:, 0] == prepared.bos).all()
    side = SIZE // codec.factor
    assert (prepared.grid, prepared.length, len(train)) == ((side, side), 1 + side * side, 11)
    assert (prepared.mask, prepared.bos, prepared.vocab) == (codec.codes, codec.codes + 1, codec.codes + 2)
    assert prepared.classes == ("a", "b")
    assert prepared == open_images(tmp_path / "out")
    assert not list(tmp_path.glob(".*"))


def test_the_folder_has_the_codec_that_made_it(folder, tmp_path):
    codec = PixelCodec(4, channels=3)
    prepared = prepare_images([folder], tmp_path / "out", codec, size=SIZE)
    decoded = prepared.codec().decode(prepared.split("train").rows([3])[:, 1:].view(1, *prepared.grid))
    assert (decoded - to_images(fit(pixels(13)[3], SIZE)[None])).abs().max() <= 1 / 3 + 1e-6


def test_a_codec_of_one_channel_gets_grey_pictures(folder, tmp_path):
    prepared = prepare_images([folder], tmp_path / "out", PixelCodec(256), size=SIZE)
    grey = fit(np.asarray(Image.fromarray(pixels(13)[0]).convert("L")), SIZE)[..., 0]
    assert prepared.split("train").rows([0])[0, 1:].tolist() == grey.flatten().tolist()


def test_flips_are_mirror_images_behind_the_others(folder, tmp_path):
    codec = Mean(factor=1)
    prepared = prepare_images([folder], tmp_path / "out", codec, size=SIZE, flips=True, batch=4)
    train = prepared.split("train")
    rows = train.rows(range(22))
    grids = rows[:, 1:].view(22, SIZE, SIZE)
    assert torch.equal(rows[:11], direct(codec, pixels(13)[:11]))
    assert torch.equal(grids[11:], grids[:11].flip(2))
    assert not torch.equal(grids[11:], grids[:11])
    assert (rows[:, 0] == prepared.bos).all()
    assert torch.equal(train.labels(range(11, 22)), train.labels(range(11)))
    assert (prepared.splits["train"].pictures, prepared.splits["valid"].rows) == (11, 2)  # validation is as it was
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("train.bin", "train.labels.bin", "valid.bin", "valid.labels.bin", INDEX, "codec")
    }


def test_large_vocabularies_have_wide_rows(folder, tmp_path):
    for codes, dtype in ((65_534, "uint16"), (65_535, "uint32")):
        prepared = prepare_images([folder], tmp_path / str(codes), Mean(codes, 1), size=SIZE)
        assert prepared.dtype == dtype
        assert torch.equal(prepared.split("valid").rows([0]), direct(Mean(codes, 1), pixels(13)[11:12]))


def test_pictures_without_classes_have_no_labels(tmp_path):
    np.save(tmp_path / "a.npy", pixels(30))
    prepared = prepare_images([tmp_path / "a.npy"], tmp_path / "out", Mean(), size=SIZE, valid=0.1)
    assert prepared.classes == ()
    assert prepared.split("train").labels([0]) is None
    assert {name: split.rows for name, split in prepared.splits.items()} == {"train": 27, "valid": 3}


def test_rows_survive_a_process_boundary_and_serve_batches(folder, tmp_path):
    train = prepare_images([folder], tmp_path / "out", Mean(), size=SIZE).split("train")
    again = pickle.loads(pickle.dumps(train))
    assert len(pickle.dumps(train)) < 1000
    taken = np.concatenate([global_batch(step, 4, len(train), seed=0) for step in range(11)])
    assert torch.equal(again.rows(taken), train.rows(taken))
    assert torch.equal(again.labels(taken), train.labels(taken))
    assert np.bincount(taken).tolist() == [4] * 11


def test_broken_pictures_are_counted_and_progress_is_told(folder, tmp_path):
    for i in range(25):
        (folder / "train" / "a" / f"1{i:02}.png").write_bytes(b"")
    seen = []
    prepared = prepare_images(
        [folder], tmp_path / "out", codec := Mean(), size=SIZE, batch=4, on_progress=lambda *at: seen.append(at)
    )
    assert (prepared.skipped, len(prepared.broken)) == (25, 20)
    assert prepared.broken[0] == f"{folder}/train/a/100.png: the file is empty"
    assert torch.equal(prepared.split("train").rows(range(11)), direct(Mean(), pixels(13)[:11]))
    assert seen == sorted(seen)
    assert seen[-1] == (38, 38, 25)
    assert codec.batches == [4, 4, 4, 1]


def test_memory_does_not_grow_with_the_input(tmp_path):
    def peak(count: int) -> int:
        np.save(tmp_path / "a.npy", np.zeros((count, 32, 32, 3), np.uint8))
        tracemalloc.start()
        prepare_images([tmp_path / "a.npy"], tmp_path / "out", Mean(), size=32, flips=True, batch=16, overwrite=True)
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    peak(10)  # what is imported on the way
    assert peak(2_000) - peak(400) < 1_600 * 32 * 32 * 3 / 2  # half of the pictures that are more


@pytest.mark.parametrize("moment", ["encode", "save"])
def test_an_interrupted_preparation_leaves_what_was_there(folder, tmp_path, moment):
    codec, calls = Mean(), []

    def stop(*_: object) -> None:
        calls.append(moment)
        if moment == "save" or len(calls) == 2:
            raise KeyboardInterrupt
        return original(*_)

    original = getattr(codec, moment)
    setattr(codec, moment, stop)
    with pytest.raises(KeyboardInterrupt):
        prepare_images([folder], tmp_path / "new" / "out", codec, size=SIZE, batch=4)
    assert not (tmp_path / "new").exists() or not list((tmp_path / "new").iterdir())
    before = prepare_images([folder], tmp_path / "old", Mean(), size=SIZE)
    calls.clear()
    with pytest.raises(KeyboardInterrupt):
        prepare_images([folder], tmp_path / "old", codec, size=SIZE, batch=4, overwrite=True)
    assert open_images(tmp_path / "old") == before
    assert {path.name for path in tmp_path.iterdir()} <= {"data", "old", "new"}


def test_only_a_folder_of_ours_is_overwritten(folder, tmp_path):
    prepare_images([folder], tmp_path / "out", Mean(), size=SIZE)
    with pytest.raises(ValueError, match="exists already"):
        prepare_images([folder], tmp_path / "out", Mean(), size=SIZE)
    again = prepare_images([folder], tmp_path / "out", Mean(codes=9), size=SIZE, overwrite=True)
    assert again.codes == 9
    with pytest.raises(ValueError, match="not a folder of prepared pictures, so it is not overwritten"):
        prepare_images([folder], folder, Mean(), size=SIZE, overwrite=True)
    assert read_images([folder]).total == 13


def test_mistakes_are_named_before_the_work(folder, tmp_path):
    flat = tmp_path / "flat"
    flat.mkdir()
    Image.fromarray(pixels(1)[0]).save(flat / "a.png")
    for inputs, codec, how, why in (
        ([folder], Mean(), {"size": 10}, "multiples of the codec's factor 4"),
        ([folder], Mean(), {"size": 0}, "size is 0"),
        ([folder], Mean(), {"size": 8, "valid": 0.0}, "valid is 0.0"),
        ([folder], Mean(), {"size": 8, "batch": 0}, "batch is 0"),
        ([folder], Mean(), {"size": 8, "filter": "sinc"}, "unknown filter 'sinc'"),
        ([folder], PixelCodec(2, channels=2), {"size": 8}, "channels is 2"),
        ([folder], Mean(wrong=60), {"size": 8}, "expected 0 to 59"),
        ([flat], Mean(), {"size": 8}, "no pictures for the valid split"),
        (["nowhere"], Mean(), {"size": 8}, "no such file or folder"),
    ):
        with pytest.raises(ValueError, match=why):
            prepare_images(inputs, tmp_path / "out", codec, **how)
        assert {path.name for path in tmp_path.iterdir()} == {"data", "flat"}


def test_a_damaged_folder_is_named(folder, tmp_path):
    out = tmp_path / "out"
    prepare_images([folder], out, Mean(), size=SIZE)
    assert holds_images(out)
    assert not holds_images(folder)
    with pytest.raises(ValueError, match=r"not an index of prepared tokens \(format images-1"):
        open_tokens(out)
    with pytest.raises(ValueError, match="no split 'test'"):
        open_images(out).split("test")
    labels = (out / "valid.labels.bin").read_bytes()
    (out / "valid.labels.bin").write_bytes(labels[:-4])
    with pytest.raises(ValueError, match=r"4 bytes, but index\.json says 8"):
        open_images(out)
    (out / "valid.labels.bin").write_bytes(labels)
    fields = json.loads((out / INDEX).read_text())
    (out / INDEX).write_text(json.dumps({k: v for k, v in fields.items() if k != "grid"}))
    with pytest.raises(ValueError, match=r"not an index of prepared pictures \('grid'"):
        open_images(out)
    with pytest.raises(ValueError, match="not a folder of prepared pictures"):
        open_images(folder)


def test_codes_and_labels_that_there_are_not_are_named(folder, tmp_path):
    out = prepare_images([folder], tmp_path / "out", codec=PixelCodec(4, 3), size=SIZE).folder
    for name, kind, place, wrong, says in (
        ("train.bin", "<u2", 3, 64, r"train\.bin holds the id 64, its vocabulary has 64"),  # a mask
        ("train.bin", "<u2", 0, 7, r"train\.bin: a row begins with 7, expected 65 for BOS"),
        ("train.labels.bin", "<i4", 0, 2, r"train\.labels\.bin holds the label 2, there are 2 classes"),
        ("train.labels.bin", "<i4", 0, -1, r"train\.labels\.bin holds the label -1, there are 2 classes"),
    ):
        raw = np.memmap(out / name, dtype=kind, mode="r+")
        right, raw[place] = raw[place], wrong
        rows = open_images(out).split("train")
        with pytest.raises(ValueError, match=says):
            rows.labels(rows.rows([0])[:, 0] * 0)
        raw[place] = right
    rows = open_images(out).split("train")
    assert len(rows.rows(range(len(rows)))) == len(rows.labels(range(len(rows)))) == 11
    os.truncate(out / "train.labels.bin", 4 * 11 - 1)
    with pytest.raises(ValueError, match=r"train\.labels\.bin: 43 bytes, but it had 44 when it was opened"):
        rows.labels([0])
