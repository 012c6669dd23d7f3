"""The three bodies of attention give the numbers of a plain loop; an empty segment gives zeros."""

import math
import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from maskless.nn.attention import attention, rotary_attention, rotary_table, rotate
from maskless.problems import Offsets

RAGGED = [  # lengths of the segments of queries and of keys
    pytest.param([3, 1, 4], [2, 5, 1], id="ragged"),
    pytest.param([2, 3, 1, 2], [0, 4, 0, 1], id="empty keys"),
    pytest.param([0, 3, 0], [2, 1, 3], id="empty queries"),
    pytest.param([0, 2, 3], [0, 0, 2], id="both empty"),
    pytest.param([2, 3], [0, 0], id="no keys at all"),
    pytest.param([0, 0], [2, 3], id="no queries at all"),
]
EQUAL = [pytest.param([3, 3], [5, 5], id="equal"), pytest.param([2, 2, 2], [0, 0, 0], id="equal and empty")]
OWN = [pytest.param(own, own, id=f"own {own}") for own in ([3, 0, 1, 5], [4, 4], [0, 0])]


def packed(lengths: list[int], seed: int, heads: int = 2, width: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(lengths), heads, width, generator=generator)


def three(q_lengths: list[int], k_lengths: list[int], **shape: int) -> tuple[Tensor, Tensor, Tensor]:
    return packed(q_lengths, 0, **shape), packed(k_lengths, 1, **shape), packed(k_lengths, 2, **shape)


def offsets(lengths: list[int]) -> Offsets:
    return Offsets.from_lengths(torch.tensor(lengths))


def loop(q: Tensor, k: Tensor, v: Tensor, q_lengths: list[int], k_lengths: list[int], causal: bool = False) -> Tensor:
    """One query and one head at a time, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    out, q_start, k_start = torch.zeros_like(q), 0, 0
    for nq, nk in zip(q_lengths, k_lengths, strict=True):
        for i in range(nq):
            seen = range(k_start, k_start + (min(nk, i + 1) if causal else nk))
            for head in range(q.shape[1]):
                score = [float(q[q_start + i, head] @ k[j, head]) / math.sqrt(q.shape[2]) for j in seen]
                total = sum(math.exp(s) for s in score)
                for j, s in zip(seen, score, strict=True):
                    out[q_start + i, head] += math.exp(s) / total * v[j, head]
        q_start, k_start = q_start + nq, k_start + nk
    return out


@pytest.mark.parametrize(("q_lengths", "k_lengths"), [*RAGGED, *EQUAL, *OWN])
def test_attention_equals_a_loop_and_causal_attention_too(q_lengths, k_lengths):
    q, k, v = three(q_lengths, k_lengths)
    for causal in (False, True) if q_lengths == k_lengths else (False,):
        out = attention(q, k, v, offsets(q_lengths), offsets(k_lengths), causal=causal)
        expected = loop(q, k, v, q_lengths, k_lengths, causal)
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("q_lengths", "k_lengths"), RAGGED + EQUAL)
def test_empty_segments_give_zeros_and_clean_gradients(q_lengths, k_lengths):
    q, k, v = (x.requires_grad_() for x in three(q_lengths, k_lengths))
    out = attention(q, k, v, offsets(q_lengths), offsets(k_lengths), causal=False)
    rows = offsets(q_lengths).owner
    lonely = (torch.tensor(k_lengths) == 0)[rows]
    assert (out[lonely] == 0).all()
    weighed = (out * packed(q_lengths, 3)).sum() + 0 * sum(x.sum() for x in (q, k, v))
    grads = torch.autograd.grad(weighed, (q, k, v))
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][lonely] == 0).all()


LONG = [  # several tiles of the kernels, boundaries within and between them
    pytest.param([70, 0, 9], [130, 3, 0], id="long"),
    pytest.param([37, 27, 0, 64, 200, 14], [27, 37, 64, 0, 14, 200], id="partitions"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("width", [64, 8])  # our kernels, and torch's
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("q_lengths", "k_lengths"), [*RAGGED, *LONG])
def test_packed_attention_on_a_gpu_equals_padded_in_float32(q_lengths, k_lengths, causal, width, rotary):
    if causal:
        k_lengths = q_lengths
    shape = {"heads": 2, "width": width}
    half = [x.bfloat16() for x in three(q_lengths, k_lengths, **shape)]
    weight = packed(q_lengths, 3, **shape).bfloat16()

    def run(device, dtype):
        q, k, v = (x.to(device, dtype).requires_grad_() for x in half)
        ends = (offsets(n).map(lambda x: x.to(device)) for n in (q_lengths, k_lengths))
        ends = tuple(replace(end, equal=False) for end in ends)
        ropes = tuple(rotary_table(400, width)[400 - sum(n) :].to(device) for n in (q_lengths, k_lengths))
        out = rotary_of(q, k, v, ends, ropes, causal) if rotary else attention(q, k, v, *ends, causal=causal)
        weighed = (out * weight.to(out)).sum() + 0 * sum(x.sum() for x in (q, k, v))
        return out, *torch.autograd.grad(weighed, (q, k, v))

    for ours, plain in zip(run("cuda", torch.bfloat16), run("cpu", torch.float32), strict=True):
        torch.testing.assert_close(ours.cpu().float(), plain, atol=3e-2, rtol=3e-2)


def rotary_of(
    q: Tensor, k: Tensor, v: Tensor, ends: tuple[Offsets, Offsets], ropes: tuple[Tensor, Tensor], causal: bool
) -> Tensor:
    """Attention with RoPE by the packed form that suits it: of one array if causal, else of two."""
    x, memory = (torch.stack((q, k, v), 1), None) if causal else (q[:, None], torch.stack((k, v), 1))
    return rotary_attention(x, memory, ends, ropes, causal=causal)


@pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="set TRITON_INTERPRET=1 where Triton is installed")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("q_lengths", "k_lengths"), [*RAGGED[:4], *LONG])
def test_the_kernels_interpreted_give_what_plain_torch_gives(q_lengths, k_lengths, causal, monkeypatch):
    kernels = pytest.importorskip("maskless.nn.cuda")
    if causal:
        k_lengths = q_lengths
    inputs = [x.requires_grad_() for x in three(q_lengths, k_lengths, width=16)]
    ends = tuple(replace(offsets(n), equal=False) for n in (q_lengths, k_lengths))
    ropes = tuple(rotary_table(400, 16)[400 - sum(n) :] for n in (q_lengths, k_lengths))
    plain = rotary_of(*inputs, ends, ropes, causal)
    unrotated, _ = kernels.attend(*inputs, *(end.bounds for end in ends), None, causal)
    torch.testing.assert_close(unrotated, attention(*inputs, *ends, causal=causal), atol=1e-5, rtol=0)
    monkeypatch.setattr("maskless.nn.attention.KERNELS", kernels)
    monkeypatch.setattr("maskless.nn.attention._fits_kernels", lambda q: True)
    ours, weight = rotary_of(*inputs, ends, ropes, causal), packed(q_lengths, 3, width=16)
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=0)
    for one, other in zip(*(torch.autograd.grad((x * weight).sum(), inputs) for x in (ours, plain)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_rotation_pairs_the_halves_of_a_head():
    x = torch.zeros(1, 1, 6)
    x[..., 1] = 1  # the second of the first half rotates towards the second of the second half
    angle = 5 * 10_000 ** (-2 / 6)
    expected = torch.zeros(1, 1, 6)
    expected[..., 1], expected[..., 4] = math.cos(angle), math.sin(angle)
    torch.testing.assert_close(rotate(x, rotary_table(6, 6)[[5]]), expected)
