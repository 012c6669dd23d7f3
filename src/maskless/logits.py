"""From logits to tokens: filters, exact draws, and random numbers that belong to one row.

Every draw uses a number that depends only on the seed, the row, the position and the purpose. So a sample is the same
alone or in a batch, on one process or on many.

Shapes: U targets, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

COLDEST = 1e-6  # a temperature below this is 0: the quotient would overflow


def temper(logits: Tensor, temperature: float) -> Tensor:
    """Logits at a temperature; 0 leaves only the most likely token.  (U, V) -> (U, V)"""
    if temperature < COLDEST:
        return top_k(logits, 1)
    return logits if temperature == 1 else logits / temperature


def top_k(logits: Tensor, k: int) -> Tensor:
    """Logits of the k most likely tokens, the others -inf (the first ones win ties).  (U, V) -> (U, V)"""
    last = logits.topk(min(k, logits.shape[-1]), dim=-1).values[:, -1:]
    return _first_k(logits, last, k)


def top_p(logits: Tensor, p: float) -> Tensor:
    """Logits of the smallest set of tokens whose probability passes p (nucleus), the others -inf.  (U, V) -> (U, V)"""
    values = _falling(logits)
    probability = values.softmax(-1)
    before = probability.cumsum(-1) - probability  # what the more likely tokens hold already
    count = (~((before >= p) & (before > 0))).sum(-1, keepdim=True)  # the first one stays, however small p is
    return _first_k(logits, values.gather(-1, count - 1), count)


def _falling(logits: Tensor) -> Tensor:
    """The values of each row from the largest on.  (U, V) -> (U, V)"""
    if logits.device.type != "cpu":
        return logits.sort(dim=-1, descending=True).values
    values = logits.detach().clone()
    values.numpy().sort(axis=-1)  # in place: torch would sort the indices too, which takes ten times as long
    return values.flip(-1)


def _first_k(logits: Tensor, last: Tensor, k: int | Tensor) -> Tensor:
    """Logits of the k largest, the others -inf; last (U, 1): the smallest of the k, of which the first ones stay."""
    level = logits == last
    extra = level & (level.cumsum(-1, dtype=torch.int32) > k - (logits > last).sum(-1, keepdim=True))
    return logits.masked_fill((logits < last) | extra, -torch.inf)


def rule_out(logits: Tensor, ids: Iterable[int]) -> Tensor:
    """Logits with these ids -inf.  (U, V) -> (U, V)"""
    logits = logits.clone()
    for i in ids:
        logits[:, i] = -torch.inf
    return logits


def guide(conditional: Tensor, unconditional: Tensor, weight: Tensor) -> Tensor:
    """(1 + w) * conditional - w * unconditional; weight (U,).  (U, V), (U, V) -> (U, V)  Classifier-free guidance

    In float32. Where w is 0 the conditional logits come back as they were. What either rules out stays ruled out: the
    difference of two infinities would be no number.
    """
    conditional, unconditional = conditional.float(), unconditional.float()
    w = weight.float().to(conditional.device)[:, None]
    wide = conditional + w * (conditional - unconditional)
    ruled_out = (conditional == -torch.inf) | ((unconditional == -torch.inf) & (w != 0))
    return torch.where(w == 0, conditional, wide).masked_fill(ruled_out, -torch.inf)


def log_probability(logits: Tensor, tokens: Tensor) -> Tensor:
    """log p of one token of each row.  (U, V), (U,) -> (U,)"""
    logits = logits.float()
    return logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)


def gumbel(u: Tensor) -> Tensor:
    """Finite draws of the standard Gumbel distribution from uniform ones in [0, 1)."""
    return -(-u.clamp_min(2.0**-54).log()).log()


def draw(logits: Tensor, u: Tensor) -> Tensor:
    """One exact categorical sample per row, by the inverse of the cumulative sum in float64.  (U, V), (U,) -> (U,)

    u: one uniform draw in [0, 1) per row. A token of probability 0 is never drawn. Where the logits are no numbers, or
    rule out every token, the id is one beyond the vocabulary: see `check_drawn`.
    """
    wide = torch.float32 if logits.device.type == "mps" else torch.float64
    cumulative = logits.to(wide).softmax(-1).cumsum(-1)
    total = cumulative[:, -1:]
    threshold = (u.to(wide)[:, None] * total).minimum(total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0]


class BrokenModelError(ValueError):
    """Logits from which no token can be drawn."""


def check_drawn(largest: int, vocab: int) -> None:
    """Raise a BrokenModelError where a draw found no token; largest: of the ids that were drawn."""
    if largest >= vocab:
        raise BrokenModelError(f"no token can be drawn: the model's logits are NaN, or rule out all {vocab} tokens")


def uniforms(keys: Tensor, columns: Tensor, purpose: int) -> Tensor:
    """Uniform draws in [0, 1) with 53 bits that are a function of key, column and purpose.  int64 -> float64

    A counter-based generator: the three numbers go through the mixing function of SplitMix64. keys and columns
    broadcast against each other.
    """
    bits = _mix(_mix(keys.long() * 8 + purpose) + columns.long())
    return (_shift(bits, 11)).double() * 2.0**-53


def row_keys(seed: int, samples: Tensor) -> Tensor:
    """The keys of the rows of a call: one per seed and sample number.  (B,) -> (B,) int64"""
    return _shift(_mix(_mix(torch.full_like(samples, seed)) + samples), 4)


def _mix(x: Tensor) -> Tensor:
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """A logical shift to the right: torch has only signed 64-bit integers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >= 1 << 63 else constant
