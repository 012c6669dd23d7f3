"""Reads LlamaGen's released image tokenizers (vq_ds8_c2i.pt), without running anything from the pickle.

A released file is a torch pickle whose weights stand under "model", sometimes beside what else a training run had.
torch's own restricted reader loads the tensors; every class that it does not know becomes an inert record.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maskless.codec.vq import VQ, VQConfig
from maskless.weights import check_archive, check_claims, damaged, filled

UNUSED = "quantize.codebook_used"  # a record of the last training batches


class _Record:
    """Stands for an object of any other class: takes whatever it is given, keeps and runs nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Record:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any): ...

    def __setstate__(self, state: Any) -> None: ...


def read(path: str | Path) -> VQ:
    """The codec of a released file, its sizes taken from the tensors."""
    path = Path(path)
    content = _load(path)
    state = content.get("model", content) if isinstance(content, dict) else None
    tensors = state if isinstance(state, dict) else {}
    state = {str(name): value for name, value in tensors.items() if isinstance(value, Tensor)}
    state.pop(UNUSED, None)
    check_claims(path, list(state.values()))
    return filled(VQ, _config(path, state), state, path).eval()


def _config(path: Path, state: dict[str, Tensor]) -> VQConfig:
    try:
        levels = _count(state, "encoder.conv_blocks.")
        blocks = _count(state, "encoder.conv_blocks.0.res.")
        width, channels = state["encoder.conv_in.weight"].shape[:2]
        codes, code_width = state["quantize.embedding.weight"].shape
        ends = [len(state[f"encoder.conv_blocks.{i}.res.0.conv2.bias"]) for i in range(levels)]
        latent = len(state["encoder.conv_out.bias"])
    except KeyError as error:
        raise ValueError(f"{path} is not a released image tokenizer: it lacks {error}") from None
    except ValueError:
        raise ValueError(f"{path} is not a released image tokenizer: its tensors have other shapes") from None
    return VQConfig(
        codes=codes,
        code_width=code_width,
        latent=latent,
        width=width,
        multipliers=tuple(end // width for end in ends),
        blocks=blocks,
        channels=channels,
    )


def _count(state: dict[str, Tensor], prefix: str) -> int:
    return len({name[len(prefix) :].split(".")[0] for name in state if name.startswith(prefix)})


def _load(path: Path) -> Any:
    try:
        archive = check_archive(path)
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path) if archive else []
        with torch.serialization.safe_globals([(_Record, name) for name in unknown]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=archive)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except pickle.UnpicklingError:  # whose message recommends to run it
        raise ValueError(f"{path} is damaged or not a checkpoint: more than tensors and settings") from None
    except Exception as error:
        raise damaged(path, error) from None
