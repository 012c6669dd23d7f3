"""Reads the text checkpoints that the paper's authors released, without running anything from the pickle.

A released file is a Lightning checkpoint: `state_dict` with a `backbone.` prefix, `ema.shadow_params` as a list of
tensors in the order of the parameters, and a configuration of classes from other packages. Tensors and plain
containers are read; every other class becomes an inert record.
"""

from __future__ import annotations

import collections
import pickle
import types
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from maskless.nn.masked import MaskedConfig, MaskedTransformer
from maskless.nn.partition import PartitionConfig, PartitionTransformer

QUERY_NAMES = {"learn+freqs": "position", "learn+freqs+mean": "mean", "learn+freqs+logsumexp": "logsumexp"}
BERT_VOCAB, BERT_MASK = 30_522, 103

# Released name -> ours, in the order of the released parameters (which is the order of the EMA).
MLP = [
    ("mlp.0.weight", "mlp.up.weight"),
    ("mlp.0.bias", "mlp.up.bias"),
    ("mlp.2.weight", "mlp.down.weight"),
    ("mlp.2.bias", "mlp.down.bias"),
]
MODULATION = [
    ("adaLN_modulation.weight", "modulation.linear.weight"),
    ("adaLN_modulation.bias", "modulation.linear.bias"),
]
STEM = [
    ("vocab_embed.embedding", "embedding.weight"),
    ("sigma_map.mlp.0.weight", "condition.input.weight"),
    ("sigma_map.mlp.0.bias", "condition.input.bias"),
    ("sigma_map.mlp.2.weight", "condition.output.weight"),
    ("sigma_map.mlp.2.bias", "condition.output.bias"),
]
SELF_BLOCK = [
    ("norm1.weight", "norm1.weight"),
    ("attn_qkv.weight", "qkv.weight"),
    ("attn_out.weight", "out.weight"),
    ("norm2.weight", "norm2.weight"),
    *MLP,
    *MODULATION,
]
SWAP = [
    ("base_embedding", "start"),
    ("pre_query_norm.weight", "norm.weight"),
    ("pre_query_norm.bias", "norm.bias"),
    ("query_processor.weight", "q.weight"),
    ("query_processor.bias", "q.bias"),
    ("hidden_to_key_value.weight", "kv.weight"),
    ("hidden_to_key_value.bias", "kv.bias"),
    ("output_linear.weight", "out.weight"),
    ("output_linear.bias", "out.bias"),
]
CROSS_BLOCK = [
    ("q_norm1.weight", "norm_q.weight"),
    ("kv_norm1.weight", "norm_kv.weight"),
    ("norm2.weight", "norm2.weight"),
    ("attn_q.weight", "q.weight"),
    ("attn_kv.weight", "kv.weight"),
    ("attn_out.weight", "out.weight"),
    *MLP,
    *MODULATION,
]
HEAD = [("norm_final.weight", "norm.weight"), ("linear.weight", "linear.weight"), ("linear.bias", "linear.bias")]


def read(path: str | Path, *, weights: str = "ema", queries: str | None = None, length: int | None = None) -> nn.Module:
    """The network of a released text checkpoint (PGM or MDLM), its sizes taken from the tensors.

    weights: "ema" or "raw". queries, length: only needed where the file's own configuration does not say.
    """
    if weights not in ("ema", "raw"):
        raise ValueError(f"unknown weights {weights!r}: expected ema or raw")
    path = Path(path)
    content = _unpickle(path)
    state = {_bare(str(name)): value for name, value in content["state_dict"].items() if isinstance(value, Tensor)}
    settings = _entry(_plain(_entry(content.get("hyper_parameters"), "config")), "model")
    network = _empty_network(path, state, settings, queries, length)
    names = _names(network)
    source = _ema(path, content, names) if weights == "ema" else state
    if unknown := [name for name in state if name not in names and not name.endswith("inv_freq")]:
        raise ValueError(f"{path} holds the tensor {unknown[0]!r}, which no known text model has")
    own = network.state_dict()
    for theirs, ours in names.items():
        if theirs not in source or source[theirs].shape != own[ours].shape:
            found = tuple(source[theirs].shape) if theirs in source else "missing"
            raise ValueError(f"{path}: {theirs!r} is {found}, expected {tuple(own[ours].shape)}")
    network.load_state_dict({ours: source[theirs].float() for theirs, ours in names.items()})
    return network


def _names(network: nn.Module) -> dict[str, str]:
    """Released name -> ours for every parameter of a network, in the released order."""
    c: Any = network.config
    prefixed = [("", "", STEM)]
    if isinstance(c, PartitionConfig):
        prefixed += [(f"encoder.blocks.{i}.", f"encoder.{i}.", SELF_BLOCK) for i in range(c.encoder)]
        prefixed += [("decoder.group_swap.", "swap.", SWAP)]
        prefixed += [(f"decoder.layers.{i}.", f"decoder.{i}.", CROSS_BLOCK) for i in range(c.decoder)]
    else:
        prefixed += [(f"blocks.{i}.", f"blocks.{i}.", SELF_BLOCK) for i in range(c.layers)]
    prefixed += [("output_layer.", "head.", HEAD + MODULATION)]
    return {theirs + a: ours + b for theirs, ours, table in prefixed for a, b in table}


def _empty_network(
    path: Path, state: dict[str, Tensor], settings: Any, queries: str | None, length: int | None
) -> nn.Module:
    if "vocab_embed.embedding" not in state or "sigma_map.mlp.0.weight" not in state:
        raise ValueError(f"{path} is not a released text checkpoint: it lacks vocab_embed or sigma_map")
    shape = tuple(state["vocab_embed.embedding"].shape)
    if len(shape) != 2:
        raise ValueError(f"{path}: 'vocab_embed.embedding' is {shape}, expected (vocabulary, width)")
    vocab, width = shape
    head_width = 2 * len(state["rotary_emb.inv_freq"]) if "rotary_emb.inv_freq" in state else 64
    mask = BERT_MASK if vocab == BERT_VOCAB else vocab - 1
    sizes: dict[str, Any] = {
        "vocab": vocab,
        "width": width,
        "heads": width // head_width,
        "condition": len(state["sigma_map.mlp.0.weight"]),
        "length": length or _entry(settings, "length") or 1024,
    }
    if "decoder.group_swap.base_embedding" not in state:
        told = length is not None or _entry(settings, "length") is not None
        return MaskedTransformer(MaskedConfig(**sizes, mask=mask, layers=_depth(state, "blocks."), always_full=told))
    mode = _entry(_entry(settings, "swap"), "pre_query_mode") or "learn+freqs"
    if queries is None and mode not in QUERY_NAMES:
        raise ValueError(f"{path} has queries of the kind {mode!r}: expected one of {', '.join(QUERY_NAMES)}")
    return PartitionTransformer(
        PartitionConfig(
            **sizes,
            never=mask,
            encoder=_depth(state, "encoder.blocks."),
            decoder=_depth(state, "decoder.layers."),
            queries=queries or QUERY_NAMES[mode],
            swap="released",
        )
    )


def _depth(state: dict[str, Tensor], prefix: str) -> int:
    return 1 + max((int(n[len(prefix) :].split(".")[0]) for n in state if n.startswith(prefix)), default=-1)


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
    while name.startswith("backbone."):
        name = name.removeprefix("backbone.")
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


def _unpickle(path: Path) -> dict[str, Any]:
    module: Any = types.SimpleNamespace(Unpickler=_Unpickler, load=_load, __name__="maskless.official")
    try:
        if zipfile.is_zipfile(path) and "constants.pkl" in torch._C.PyTorchFileReader(str(path)).get_all_records():
            raise ValueError("a TorchScript archive holds code")
        content = torch.load(path, map_location="cpu", pickle_module=module, weights_only=False)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except Exception as error:  # a damaged file fails in as many ways as there are formats
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(f"{path} is damaged or not a checkpoint: {type(error).__name__}: {reason}") from None
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise ValueError(f"{path} is not a released text checkpoint: it holds no state_dict")
    return content


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
