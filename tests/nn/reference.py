"""The released networks in plain form: groups, dense boolean masks, loops over heads, everything in float64.

Written from the formulas of the architecture and from nothing in the package, for parity tests. A state dict has the
released names. Shapes: B batch, L length, H width, V vocabulary.
"""

import math

import torch
from torch import Tensor

State = dict[str, Tensor]


def partition_logits(state: State, tokens: Tensor, groups: Tensor, heads: int, mode: str = "learn+freqs") -> Tensor:
    """Every token predicted from the other group.  (B, L), (B, L) of 0 and 1 -> (B, L, V)"""
    state = _wide(state)
    same = groups[:, :, None] == groups[:, None, :]
    c = _condition(state)
    encoded = state["vocab_embed.embedding"][tokens]
    for name in _blocks(state, "encoder.blocks."):
        encoded = _self_block(state, name, encoded, same, heads, c)
    x = _group_swap(state, encoded, groups, heads, mode)
    for name in _blocks(state, "decoder.layers."):
        x = _cross_block(state, name, x, encoded, ~same, heads, c)
    return _output(state, x, c)


def masked_logits(state: State, tokens: Tensor, heads: int) -> Tensor:
    """Every position from every other; unknown ones already hold the mask id.  (B, L) -> (B, L, V)"""
    state = _wide(state)
    c, x = _condition(state), state["vocab_embed.embedding"][tokens]
    everything = torch.ones(*tokens.shape, tokens.shape[1], dtype=torch.bool)
    for name in _blocks(state, "blocks."):
        x = _self_block(state, name, x, everything, heads, c)
    return _output(state, x, c)


def image_logits(state: State, tokens: Tensor, groups: Tensor, labels: Tensor, heads: int) -> Tensor:
    """As `partition_logits`, for images: two registers lead each sequence, and a class conditions it.  (B,) labels"""
    state, B = _wide(state), len(tokens)
    lead = torch.tensor([1, 0]).expand(B, 2)
    groups = torch.cat([lead, groups], 1)
    same = groups[:, :, None] == groups[:, None, :]
    c = state["cls_embed.embedding_table.weight"][labels][:, None]
    registers = state["reg_tokens.weight"].expand(B, 2, -1)
    encoded = torch.cat([registers, state["vocab_embed.embedding"][tokens]], 1)
    for name in _blocks(state, "encoder.blocks."):
        encoded = _self_block(state, name, encoded, same, heads, c)
    x = _group_swap(state, encoded, groups, heads, "learn+freqs")
    for name in _blocks(state, "decoder.layers."):
        x = _cross_block(state, name, x, encoded, ~same, heads, c)
    return _output(state, x[:, 2:], c)


def maskgit_logits(state: State, tokens: Tensor, labels: Tensor, heads: int) -> Tensor:
    """Every token of an image from every other and a register; unknown ones hold the mask id.  (B, N) -> (B, N, V)"""
    state, B = _wide(state), len(tokens)
    c = _silu(state["cls_emb.weight"][labels])[:, None]
    x = torch.cat(
        [state["tok_emb.weight"][tokens] + state["pos_emb.weight"], state["reg_tokens.weight"].expand(B, 1, -1)], 1
    )
    for name in _blocks(state, "transformer.layers."):
        shift1, scale1, gate1, shift2, scale2, gate2 = _linear(state, f"{name}mlp.1", c).chunk(6, -1)
        y = _rms(x) * state[f"{name}ln1.weight"] * (1 + scale1) + shift1
        q, k, v = (_linear(state, f"{name}attn.{part}", y) for part in ("wq", "wk", "wv"))
        outs = []
        for q_, k_, v_ in zip(*(part.chunk(heads, -1) for part in (_rms(q), _rms(k), v)), strict=True):
            weight = (q_ @ k_.transpose(1, 2) / math.sqrt(q_.shape[-1])).softmax(-1)
            outs.append(weight @ v_)
        x = x + gate1 * _linear(state, f"{name}attn.wo", torch.cat(outs, -1))
        y = _rms(x) * state[f"{name}ln2.weight"] * (1 + scale2) + shift2
        inner = _silu(_linear(state, f"{name}ff.w1", y)) * _linear(state, f"{name}ff.w3", y)
        x = x + gate2 * _linear(state, f"{name}ff.w2", inner)
    shift, scale = _linear(state, "last_norm.mlp.1", c).chunk(2, -1)
    y = _rms(x[:, :-1]) * state["last_norm.norm_final.weight"] + state["last_norm.norm_final.bias"]
    return (y * (1 + scale) + shift) @ state["tok_emb.weight"].T + state["head.bias"]


def random_maskgit(*, vocab: int, width: int, places: int, classes: int, blocks: int, hidden: int) -> State:
    """A state dict of a MaskGIT with the released names, in the released order."""
    D, H = width, hidden
    block = {"mlp.1.weight": (6 * D, D), "mlp.1.bias": (6 * D,), "ln1.weight": (D,)}
    block |= {f"attn.{name}.weight": (D, D) for name in ("wq", "wk", "wv", "wo")} | {"ln2.weight": (D,)}
    block |= {"ff.w1.weight": (H, D), "ff.w2.weight": (D, H), "ff.w3.weight": (H, D)}
    shapes = {"cls_emb.weight": (classes + 1, D), "tok_emb.weight": (vocab, D), "pos_emb.weight": (places, D)}
    shapes |= {f"transformer.layers.{i}.{name}": shape for i in range(blocks) for name, shape in block.items()}
    shapes |= {"last_norm.norm_final.weight": (D,), "last_norm.norm_final.bias": (D,)}
    shapes |= {"last_norm.mlp.1.weight": (2 * D, D), "last_norm.mlp.1.bias": (2 * D,)}
    shapes |= {"head.bias": (vocab,), "reg_tokens.weight": (1, D)}
    generator = torch.Generator().manual_seed(0)
    state = {name: torch.randn(shape, generator=generator) * _spread(name, shape) for name, shape in shapes.items()}
    gains = [name for name in state if name.endswith(("ln1.weight", "ln2.weight", "norm_final.weight"))]
    state |= {name: 1 + 0.3 * torch.randn(D, generator=generator) for name in gains}
    return state | {"head.weight": state["tok_emb.weight"]}


def random_state(
    *,
    vocab: int,
    width: int,
    heads: int,
    condition: int,
    encoder: int = 0,
    decoder: int = 0,
    blocks: int = 0,
    classes: int = 0,
    seed=0,
) -> State:
    """A state dict with the released names, in the released order; MDLM's where `blocks` is given, an image PGM's where
    `classes` is."""
    H, C, V = width, condition, vocab
    mlp = {"mlp.0.weight": (4 * H, H), "mlp.0.bias": (4 * H,), "mlp.2.weight": (H, 4 * H), "mlp.2.bias": (H,)}
    six = {"adaLN_modulation.weight": (6 * H, C), "adaLN_modulation.bias": (6 * H,)}
    own = {"norm1.weight": (H,), "attn_qkv.weight": (3 * H, H), "attn_out.weight": (H, H), "norm2.weight": (H,)}
    cross = {"q_norm1.weight": (H,), "kv_norm1.weight": (H,), "norm2.weight": (H,)}
    cross |= {"attn_q.weight": (H, H), "attn_kv.weight": (2 * H, H), "attn_out.weight": (H, H)}
    swap = {"base_embedding": (1, H), "pre_query_norm.weight": (H,), "pre_query_norm.bias": (H,)}
    swap |= {"query_processor.weight": (H, H), "query_processor.bias": (H,)}
    swap |= {"hidden_to_key_value.weight": (2 * H, H), "hidden_to_key_value.bias": (2 * H,)}
    swap |= {"output_linear.weight": (H, H), "output_linear.bias": (H,)}
    out = {"norm_final.weight": (H,), "linear.weight": (V, H), "linear.bias": (V,)}
    out |= {"adaLN_modulation.weight": (2 * H, C), "adaLN_modulation.bias": (2 * H,)}
    shapes = {"vocab_embed.embedding": (V, H)}
    if classes:
        shapes["cls_embed.embedding_table.weight"] = (classes + 1, C)
    else:
        shapes |= {"sigma_map.mlp.0.weight": (C, 256), "sigma_map.mlp.0.bias": (C,)}
        shapes |= {"sigma_map.mlp.2.weight": (C, C), "sigma_map.mlp.2.bias": (C,)}
    parts = [(f"encoder.blocks.{i}.", own | mlp | six) for i in range(encoder)]
    parts += [(f"blocks.{i}.", own | mlp | six) for i in range(blocks)]
    parts += [] if blocks else [("decoder.group_swap.", swap)]
    parts += [(f"decoder.layers.{i}.", cross | mlp | six) for i in range(decoder)]
    parts += [("output_layer.", out)]
    parts += [("reg_tokens.", {"weight": (2, H)})] if classes else []
    shapes |= {prefix + name: shape for prefix, table in parts for name, shape in table.items()}
    generator = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(shape, generator=generator) * _spread(name, shape) for name, shape in shapes.items()}
    state |= {name: 1 + 0.3 * value for name, value in state.items() if "norm" in name and name.endswith("weight")}
    d = width // heads
    state["rotary_emb.inv_freq"] = 10_000.0 ** (-torch.arange(0, d, 2) / d)
    return state


def parameters(state: State) -> list[Tensor]:
    """In the order of the released modules, which the EMA follows; buffers are no parameters."""
    return [value for name, value in state.items() if name != "rotary_emb.inv_freq"]


def _spread(name: str, shape: tuple[int, ...]) -> float:
    return 1.0 if "norm" in name or "embed" in name else 0.5 if len(shape) == 1 else shape[-1] ** -0.5


def _wide(state: State) -> State:
    return {name: value.double() for name, value in state.items()}


def _blocks(state: State, prefix: str) -> list[str]:
    found = {int(name.removeprefix(prefix).split(".")[0]) for name in state if name.startswith(prefix)}
    return [f"{prefix}{i}." for i in sorted(found)]


def _linear(state: State, name: str, x: Tensor) -> Tensor:
    y = x @ state[f"{name}.weight"].T
    return y + state[f"{name}.bias"] if f"{name}.bias" in state else y


def _norm(x: Tensor, weight: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias


def _rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def _silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _condition(state: State) -> Tensor:
    time = torch.cat([torch.ones(128), torch.zeros(128)]).double()  # cosines and sines of 0
    return _silu(_linear(state, "sigma_map.mlp.2", _silu(_linear(state, "sigma_map.mlp.0", time))))


def _rotate(x: Tensor) -> Tensor:
    """RoPE of positions 0 to L-1, halves of a head paired.  (B, L, d)"""
    d = x.shape[-1]
    angle = torch.arange(x.shape[1])[:, None] * 10_000.0 ** (-2 * torch.arange(d // 2).double() / d)
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, heads: int) -> Tensor:
    """(B, L, H) x 3, (B, L, L) bool -> (B, L, H); a query that may see nothing gets zeros."""
    outs = []
    for q_, k_, v_ in zip(*(x.chunk(heads, -1) for x in (q, k, v)), strict=True):
        score = _rotate(q_) @ _rotate(k_).transpose(1, 2) / math.sqrt(q_.shape[-1])
        weight = torch.where(mask, (score - score.amax(-1, keepdim=True)).exp(), 0.0)
        outs.append(weight @ v_ / weight.sum(-1, keepdim=True).clamp_min(1e-300))
    return torch.cat(outs, -1)


def _mlp(state: State, name: str, x: Tensor) -> Tensor:
    return _linear(state, f"{name}mlp.2", _gelu(_linear(state, f"{name}mlp.0", x)))


def _self_block(state: State, name: str, x: Tensor, mask: Tensor, heads: int, c: Tensor) -> Tensor:
    shift1, scale1, gate1, shift2, scale2, gate2 = _linear(state, f"{name}adaLN_modulation", c).chunk(6, -1)
    y = _norm(x, state[f"{name}norm1.weight"]) * (1 + scale1) + shift1
    q, k, v = _linear(state, f"{name}attn_qkv", y).chunk(3, -1)
    x = x + gate1 * _linear(state, f"{name}attn_out", _attend(q, k, v, mask, heads))
    y = _norm(x, state[f"{name}norm2.weight"]) * (1 + scale2) + shift2
    return x + gate2 * _mlp(state, name, y)


def _cross_block(state: State, name: str, x: Tensor, encoded: Tensor, mask: Tensor, heads: int, c: Tensor) -> Tensor:
    shift1, scale1, gate1, shift2, scale2, gate2 = _linear(state, f"{name}adaLN_modulation", c).chunk(6, -1)
    q = _linear(state, f"{name}attn_q", _norm(x, state[f"{name}q_norm1.weight"]) * (1 + scale1) + shift1)
    k, v = _linear(state, f"{name}attn_kv", _norm(encoded, state[f"{name}kv_norm1.weight"])).chunk(2, -1)
    x = x + gate1 * _linear(state, f"{name}attn_out", _attend(q, k, v, mask, heads))
    y = _norm(x, state[f"{name}norm2.weight"]) * (1 + scale2) + shift2
    return x + gate2 * _mlp(state, name, y)


def _group_swap(state: State, encoded: Tensor, groups: Tensor, heads: int, mode: str) -> Tensor:
    name = "decoder.group_swap."
    B, L, H = encoded.shape
    angle = torch.arange(L)[:, None] / 10_000.0 ** (2 * torch.arange(H // 2).double() / H)
    query = state[f"{name}base_embedding"] + torch.cat([angle.cos(), angle.sin()], 1).expand(B, L, H)
    if mode != "learn+freqs":
        query = query + _aggregate(encoded, groups, mode)
    query = _norm(query, state[f"{name}pre_query_norm.weight"], state[f"{name}pre_query_norm.bias"])
    q = _linear(state, f"{name}query_processor", query)
    k, v = _linear(state, f"{name}hidden_to_key_value", encoded).chunk(2, -1)
    other = groups[:, :, None] != groups[:, None, :]
    return _linear(state, f"{name}output_linear", _attend(q, k, v, other, heads))


def _aggregate(encoded: Tensor, groups: Tensor, mode: str) -> Tensor:
    """Of the group that a position is not in; zero where that group is empty.  (B, L, H) -> (B, L, H)"""
    out = torch.zeros_like(encoded)
    for b in range(len(encoded)):
        for group in (0, 1):
            members = encoded[b, groups[b] == group]
            if len(members):
                summary = members.mean(0) if mode == "learn+freqs+mean" else members.logsumexp(0)
                out[b, groups[b] != group] = summary
    return out


def _output(state: State, x: Tensor, c: Tensor) -> Tensor:
    shift, scale = _linear(state, "output_layer.adaLN_modulation", c).chunk(2, -1)
    return _linear(
        state, "output_layer.linear", _norm(x, state["output_layer.norm_final.weight"]) * (1 + scale) + shift
    )
