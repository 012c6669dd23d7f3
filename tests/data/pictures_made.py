"""Pictures for tests, as files, folders and archives, and what is read back from them."""

import io
import tarfile
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

from maskless.data.images import read_images


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
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(prefix + name, data)
    return path


def everything(*inputs: object) -> list[tuple[bytes, int, str]]:
    """(pixels, label, side) of each picture, at the size it has."""
    return [(entry.load().tobytes(), entry.label, side) for side, entry in read_images(inputs).entries()]
