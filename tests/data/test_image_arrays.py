"""Pictures in arrays: IDX, CIFAR and NumPy files give back what was put in, and a bad one is named in a line."""

import gzip
import struct

import numpy as np
import pytest
from pictures_made import everything, plant, tar

from command_inputs import noise
from maskless.data.image_arrays import CIFAR
from maskless.data.image_files import UNLABELLED
from maskless.data.images import looks_like_images, read_images


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


def cifar_files(labels: list[int]) -> tuple[dict[str, bytes], np.ndarray]:
    """Nine pictures in two batches and a test batch of three."""
    pixels = noise(9, 32, 32, 3)
    records = np.column_stack([np.array(labels, np.uint8), pixels.transpose(0, 3, 1, 2).reshape(9, 3072)])
    names = ("data_batch_1.bin", "data_batch_2.bin", "test_batch.bin")
    return {name: records[3 * i : 3 * i + 3].tobytes() for i, name in enumerate(names)}, pixels


def test_cifar_gives_back_its_pictures(tmp_path):
    labels = [6, 9, 0, 4, 1, 1, 3, 8, 8]
    files, pixels = cifar_files(labels)
    folder = plant(tmp_path / "cifar", files)
    sides = ["train"] * 6 + ["valid"] * 3
    expected = [(p.tobytes(), label, side) for p, label, side in zip(pixels, labels, sides, strict=True)]
    assert everything(folder) == expected
    assert everything(tar(tmp_path / "package.tar.gz", files, "package/").rename(tmp_path / "p.tgz")) == expected
    assert read_images([folder]).classes == CIFAR
    assert looks_like_images([folder])


def test_bad_cifar_is_named(tmp_path):
    files, _ = cifar_files([0, 1, 2, 10, 4, 5, 6, 7, 8])
    with pytest.raises(ValueError, match=r"data_batch_2\.bin: picture 0 has the label 10, expected 0 to 9"):
        read_images([plant(tmp_path / "label", files)])
    files, _ = cifar_files(list(range(9)))
    cut = files | {"data_batch_1.bin": files["data_batch_1.bin"][: 3073 * 3 // 2]}
    with pytest.raises(ValueError, match=r"data_batch_1\.bin"):
        everything(plant(tmp_path / "cut", cut))


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
