"""Reads the checkpoints of the paper's authors, and LlamaGen's codecs, without running anything from the pickle.

A released text file is a Lightning checkpoint: `state_dict` with a `backbone.` prefix, `ema.shadow_params` as a list of
tensors in the order of the parameters, and a configuration of classes from other packages. An image file has
`model_state_dict`, no averages and no configuration. Tensors and plain containers are read; every other class becomes
an inert record.
"""

from __future__ import annotations

import collections
import math
import pickle
import tomllib
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from maskless.codec.vq import VQ, VQConfig
from maskless.nn.masked import MaskedConfig, MaskedTransformer
from maskless.nn.maskgit import MaskGIT, MaskGITConfig
from maskless.nn.partition import PartitionConfig, PartitionTransformer
from maskless.weights import check_archive, check_claims, damaged, filled, outline

QUERY_NAMES = {"learn+freqs": "position", "learn+freqs+mean": "mean", "learn+freqs+logsumexp": "logsumexp"}
BERT_VOCAB, BERT_MASK = 30_522, 103
HEAD_WIDTH = 64  # of all released networks; a Partition Transformer's file also tells

UNUSED = "quantize.codebook_used"  # of a codec: a record of the last training batches
IGNORED = ("inv_freq", "head.weight")  # a constant; and in a MaskGIT, its token vectors under another name


def read(path: str | Path, *, weights: str = "ema", queries: str | None = None, length: int | None = None) -> nn.Module:
    """The network of a released checkpoint, its sizes taken from the tensors: PGM, MDLM, or for images PGM or MaskGIT.

    weights: "ema" or "raw"; for images no averages were kept, and what there is comes for either. queries, length: only
    needed where the file's own configuration does not say (by default the released sizes).
    """
    if weights not in ("ema", "raw"):
        raise ValueError(f"unknown weights {weights!r}: expected ema or raw")
    path = Path(path)
    content = _unpickle(path)
    images = not isinstance(_entry(content, "state_dict"), dict)
    stored = _entry(content, "model_state_dict" if images else "state_dict")
    if not isinstance(stored, dict):
        raise ValueError(f"{path} is not a released checkpoint: it holds no state_dict")
    state = {_bare(str(name)): value for name, value in stored.items() if isinstance(value, Tensor)}
    settings = _entry(_plain(_entry(content.get("hyper_parameters"), "config")), "model")
    try:
        make, config = _sizes(state, settings, queries, length)
    except (ValueError, TypeError, RuntimeError, IndexError, ArithmeticError) as error:
        raise ValueError(f"{path} is not a released checkpoint: {error}") from None
    names = _names(config)
    source = _ema(path, content, names) if weights == "ema" and not images else state
    if unknown := [name for name in state if name not in names and not name.endswith(IGNORED)]:
        raise ValueError(
            f"{path} holds the tensor {unknown[0]!r}, which no known {'image' if images else 'text'} model has"
        )
    check_claims(path, [source[name] for name in names if name in source])
    own = outline(make, config, len(source), path).state_dict()
    return filled(make, config, _fitting(path, source, names, own), path)


def read_codec(path: str | Path) -> VQ:
    """The codec of LlamaGen's released image tokenizers (vq_ds8_c2i.pt), its sizes taken from the tensors.

    The weights stand under "model", sometimes beside what else a training run had.
    """
    path = Path(path)
    content = _unpickle(path)
    stored = content.get("model", content) if isinstance(content, dict) else None
    tensors = stored.items() if isinstance(stored, dict) else ()
    state = {str(name): value for name, value in tensors if isinstance(value, Tensor) and name != UNUSED}
    check_claims(path, list(state.values()))
    return filled(VQ, _codec_sizes(path, state), state, path).eval()


def _codec_sizes(path: Path, state: dict[str, Tensor]) -> VQConfig:
    try:
        levels = _depth(state, "encoder.conv_blocks.")
        blocks = _depth(state, "encoder.conv_blocks.0.res.")
        width, channels = state["encoder.conv_in.weight"].shape[:2]
        codes, code_width = state["quantize.embedding.weight"].shape
        ends = [len(state[f"encoder.conv_blocks.{i}.res.0.conv2.bias"]) for i in range(levels)]
        latent = len(state["encoder.conv_out.bias"])
    except KeyError as error:
        raise ValueError(f"{path} is not a released image tokenizer: it lacks {error}") from None
    except (ValueError, TypeError):
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


def _fitting(path: Path, source: dict[str, Tensor], names: dict[str, str], own: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under our names; one clear line about the first that does not fit."""
    parts: dict[str, list[Tensor]] = {ours: [] for ours in own}
    of = collections.Counter(names.values())
    for theirs, ours in names.items():
        rows, *others = own[ours].shape
        expected = (rows // of[ours], *others)
        if theirs not in source or tuple(source[theirs].shape) != expected:
            found = tuple(source[theirs].shape) if theirs in source else "missing"
            raise ValueError(f"{path}: {theirs!r} is {found}, expected {expected}")
        parts[ours].append(source[theirs].float())
    return {ours: torch.cat(tensors) for ours, tensors in parts.items()}


def _names(c: Any) -> dict[str, str]:
    """Released name -> ours for every parameter of a network with this configuration, in the released order."""
    known = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    pgm = "pgm" if getattr(c, "classes", None) is None else "pgm-image"
    kind, names = {MaskGITConfig: "maskgit", MaskedConfig: "mdlm"}.get(type(c), pgm), dict[str, str]()
    for theirs, ours, table, *count in known["networks"][kind]:
        for i in range(getattr(c, count[0]) if count else 1):
            names |= {theirs.format(i) + a: ours.format(i) + b for a, b in known[table].items()}
    return names


def _sizes(
    state: dict[str, Tensor], settings: Any, queries: str | None, length: int | None
) -> tuple[type[nn.Module], Any]:
    """What kind of network it is, and its configuration."""
    if "tok_emb.weight" in state and "cls_emb.weight" in state:
        return MaskGIT, _maskgit_sizes(state)
    image = "cls_embed.embedding_table.weight" in state
    if "vocab_embed.embedding" not in state or not (image or "sigma_map.mlp.0.weight" in state):
        raise ValueError("it lacks vocab_embed, or sigma_map and cls_embed")
    vocab, width = _table(state, "vocab_embed.embedding")
    inverse = state.get("rotary_emb.inv_freq")
    sizes: dict[str, Any] = {
        "vocab": vocab,
        "width": width,
        "heads": max(1, width // (HEAD_WIDTH if inverse is None else 2 * len(inverse))),
        "length": length or _entry(settings, "length") or (1025 if image else 1024),
    }
    if image:
        classes, sizes["condition"] = _table(state, "cls_embed.embedding_table.weight")
        sizes |= {"classes": classes - 1, "registers": True, "grid": _square(sizes["length"])}
        mask = vocab - 2  # the last id is BOS
    else:
        sizes["condition"] = len(state["sigma_map.mlp.0.weight"])
        mask = BERT_MASK if vocab == BERT_VOCAB else vocab - 1
    if "decoder.group_swap.base_embedding" not in state and not image:
        told = length is not None or _entry(settings, "length") is not None
        return MaskedTransformer, MaskedConfig(**sizes, mask=mask, layers=_depth(state, "blocks."), always_full=told)
    mode = _entry(_entry(settings, "swap"), "pre_query_mode") or "learn+freqs"
    if queries is None and mode not in QUERY_NAMES:
        raise ValueError(f"it has queries of the kind {mode!r}: expected one of {', '.join(QUERY_NAMES)}")
    return PartitionTransformer, PartitionConfig(
        **sizes,
        never=mask,
        encoder=_depth(state, "encoder.blocks."),
        decoder=_depth(state, "decoder.layers."),
        queries=queries or QUERY_NAMES[mode],
        swap="released",
    )


def _maskgit_sizes(state: dict[str, Tensor]) -> MaskGITConfig:
    vocab, width = _table(state, "tok_emb.weight")
    places, hidden = (_table(state, name)[0] for name in ("pos_emb.weight", "transformer.layers.0.ff.w1.weight"))
    return MaskGITConfig(
        vocab=vocab,
        mask=vocab - 1,
        length=1 + places,
        classes=_table(state, "cls_emb.weight")[0] - 1,
        width=width,
        heads=max(1, width // HEAD_WIDTH),
        layers=_depth(state, "transformer.layers."),
        hidden=hidden,
        grid=_square(1 + places),
    )


def _table(state: dict[str, Tensor], name: str) -> tuple[int, int]:
    """The sizes of a matrix."""
    shape = tuple(state[name].shape) if name in state else "missing"
    if len(shape) != 2 or isinstance(shape, str):
        raise ValueError(f"{name!r} is {shape}, expected a matrix of two sizes")
    return shape[0], shape[1]


def _square(length: int) -> tuple[int, int] | None:
    """The sides of a square image that follows a BOS."""
    side = math.isqrt(length - 1)
    return (side, side) if side * side == length - 1 else None


def _depth(state: dict[str, Tensor], prefix: str) -> int:
    numbers = {n[len(prefix) :].split(".")[0] for n in state if n.startswith(prefix)}
    if numbers != {str(number) for number in range(len(numbers))}:
        raise TypeError(f"the layers {prefix}* are not numbered from 0 on")
    return len(numbers)


def _ema(path: Path, content: dict[str, Any], names: dict[str, str]) -> dict[str, Tensor]:
    shadow = _entry(content.get("ema"), "shadow_params")
    if not isinstance(shadow, list) or not all(isinstance(value, Tensor) for value in shadow):
        raise ValueError(f"{path} holds no EMA weights: ask for weights='raw'")
    if len(shadow) != len(names):
        raise ValueError(f"{path} holds {len(shadow)} EMA tensors, expected {len(names)}")
    return dict(zip(names, shadow, strict=True))


def _entry(node: Any, key: str) -> Any:
    """An entry of a dictionary; None where there is no such entry, or no dictionary."""
    return node.get(key) if isinstance(node, dict) else None


def _bare(name: str) -> str:
    name = name.replace("_orig_mod.", "")
    while name.startswith(("backbone.", "module.")):
        name = name.split(".", 1)[1]
    return name


class _Record:
    """Stands for an object of any other class: keeps its state, runs nothing."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, value: Any) -> None: ...

    def extend(self, values: Any) -> None: ...


class _Unpickler(pickle.Unpickler):
    """Finds tensors and plain containers, and a record class for every other name."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_parameter")):
            rebuild = getattr(torch._utils, name)
            return lambda *args: rebuild(*args)  # a pickle can set attributes of what it finds: never torch's own
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        return _Record


def _load(file: Any, **kwargs: Any) -> Any:
    return _Unpickler(file, **kwargs).load()


def _unpickle(path: Path) -> Any:
    if path.is_file() and not _begins_as_one(path):
        raise ValueError(f"{path} is damaged or not a checkpoint: neither an archive nor a pickle that torch wrote")
    module: Any = types.SimpleNamespace(Unpickler=_Unpickler, load=_load, __name__="maskless.official")
    try:
        archive = check_archive(path)
        if archive and "constants.pkl" in torch._C.PyTorchFileReader(str(path)).get_all_records():
            raise ValueError("a TorchScript archive holds code")
        return torch.load(path, map_location="cpu", pickle_module=module, weights_only=False, mmap=archive)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except Exception as error:
        raise damaged(path, error) from None


def _begins_as_one(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(1) in (b"P", b"\x80")  # of a ZIP archive, of a pickle


def _plain(node: Any) -> Any:
    """The values of a stored configuration (OmegaConf keeps them as `_content` and `_val`)."""
    if isinstance(node, _Record):
        state = node.state[0] if isinstance(node.state, tuple) else node.state
        if not isinstance(state, dict):
            return None
        return _plain(state["_content"]) if "_content" in state else _plain(state.get("_val"))
    if isinstance(node, dict):
        return {key: _plain(value) for key, value in node.items()}
    return [_plain(value) for value in node] if isinstance(node, list) else node
