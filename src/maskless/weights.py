"""Networks and their weights: one is made only where the tensors at hand fit it, so a small file cannot ask for much.

A configuration says how large a network is. It is laid out on torch's meta device first, which takes no memory, and
compared with the names and shapes of the tensors; only then is it made.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

Network = TypeVar("Network", bound=nn.Module)
Make = Callable[[Any], Network]  # from its configuration
Shapes = Mapping[str, tuple[int, ...]]

LAYERS = ("encoder", "decoder", "layers", "blocks")  # fields of a configuration that say how many
LAYER = 8  # tensors that each has, or more
TABLES = 1 << 26  # bytes of tables of positions, which no file of weights holds, that any network may have


def read_network(file: Path, make: Make[Network], config: Any, *, kind: str) -> Network:
    """A network with the weights in a safetensors file, whose shapes are looked at first.

    kind: what the folder of the file should be.
    """
    try:
        with safe_open(file, "pt") as opened:
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        network = _made(make, config, shapes, file)
        network.load_state_dict(load_file(file))
    except FileNotFoundError:
        raise ValueError(f"{file.parent} is not a {kind} folder: it has no {file.name}") from None
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or not a safetensors file: {error}") from None
    return network


def filled(make: Make[Network], config: Any, state: Mapping[str, Tensor], source: object) -> Network:
    """A network with weights that have been read."""
    network = _made(make, config, {name: tuple(value.shape) for name, value in state.items()}, source)
    network.load_state_dict(state)
    return network


def outline(make: Make[Network], config: Any, tensors: int, source: object) -> Network:
    """A network without numbers, as its configuration has it; tensors: how many there are to fill it."""
    layers = sum(getattr(config, name, 0) for name in LAYERS)
    if LAYER * layers > tensors:
        raise ValueError(f"{source} holds {tensors:,} tensors: expected those of {layers:,} layers")
    try:
        with torch.device("meta"):
            return make(config)
    except (RuntimeError, ArithmeticError, TypeError) as error:  # more numbers than a tensor can have
        raise ValueError(f"{source} cannot hold a network of these sizes: {str(error).splitlines()[0]}") from None


def damaged(file: Path, error: Exception) -> ValueError:
    """What to say of a file that cannot be read, which fails in as many ways as there are formats."""
    reason = (str(error).strip().splitlines() or [""])[0]
    return ValueError(f"{file} is damaged or not a checkpoint: {type(error).__name__}: {reason}")


def check_archive(file: Path) -> bool:
    """Whether a file is a ZIP archive; a ValueError if something in it is compressed, as torch never does it.

    Then the archive can be mapped into memory: nothing in it grows when it is read.
    """
    if not zipfile.is_zipfile(file):
        return False
    with zipfile.ZipFile(file) as archive:
        if packed := [part.filename for part in archive.infolist() if part.compress_type != zipfile.ZIP_STORED]:
            raise ValueError(f"{packed[0]} is compressed in it")
    return True


def check_claims(file: Path, tensors: list[Tensor]) -> None:
    """Raise a ValueError if tensors of a pickle have more numbers than the file.

    Those of one storage may overlap, or repeat one number for ever. Twice is allowed: some networks share tensors.
    """
    claimed, size = sum(value.nbytes for value in tensors), file.stat().st_size
    if claimed > 2 * size:
        raise ValueError(f"{file} has {size:,} bytes, but its tensors claim {claimed:,}")


def _made(make: Make[Network], config: Any, shapes: Shapes, source: object) -> Network:
    laid_out = outline(make, config, len(shapes), source)
    own = laid_out.state_dict()
    for name, value in own.items():
        if shapes.get(name) != tuple(value.shape):
            raise ValueError(f"{source}: {name!r} is {shapes.get(name, 'missing')}, expected {tuple(value.shape)}")
    if extra := shapes.keys() - own.keys():
        raise ValueError(f"{source} holds the unknown tensor {min(extra)!r}")
    tables, weights = (sum(value.nbytes for value in each) for each in (laid_out.buffers(), own.values()))
    if tables > max(TABLES, weights):
        raise ValueError(
            f"{source} has {weights:,} bytes of weights, but a length of {config.length:,} takes {tables:,} more for "
            "its positions: expected a shorter one"
        )
    return make(config)
