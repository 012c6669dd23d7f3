"""Attention on stairs: each query sees the first keys of its segment; all bodies give the numbers of a plain loop."""

import math
import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from maskless.nn.attention import Stairs, _askers, attention, rotary_attention, rotary_table
from maskless.problems import Offsets, Seen

# Lengths of the segments of queries and of keys, and how many keys each query sees; None: a chain.
SHAPES = [
    pytest.param([4, 4], [3, 3], None, id="chain"),
    pytest.param([4, 4], [4, 4], None, id="chain after one that is known"),
    pytest.param([3, 3], [6, 6], None, id="chain after several"),
    pytest.param([1, 1], [0, 0], None, id="nothing before"),
    pytest.param([4, 2, 3], [3, 5, 2], None, id="ragged chains"),
    pytest.param([3, 3], [4, 4], [[0, 0, 3], [1, 1, 4]], id="steps of several"),
    pytest.param([2, 4, 1], [3, 2, 4], [[0, 2], [0, 1, 1, 2], [4]], id="ragged steps"),
]
LONG = [
    pytest.param([150, 150], [149, 149], None, id="long chains"),
    pytest.param([70, 3, 131], [69, 80, 130], None, id="long ragged chains"),
    pytest.param([66, 130], [140, 70], [[0] * 33 + [139] * 33, [i // 8 * 4 for i in range(130)]], id="long steps"),
]
WIDTH = 16


def packed(lengths: list[int], seed: int, width: int = WIDTH) -> Tensor:
    return torch.randn(sum(lengths), 2, width, generator=torch.Generator().manual_seed(seed))


def counts_of(q_lengths: list[int], k_lengths: list[int], seen: list[list[int]] | None) -> list[list[int]]:
    if seen is not None:
        return seen
    return [[k - q + 1 + i for i in range(q)] for q, k in zip(q_lengths, k_lengths, strict=True)]


def made(q_lengths: list[int], k_lengths: list[int], seen: list[list[int]] | None):
    """Queries, keys and values, their offsets, and what each query sees."""
    q, k, v = packed(q_lengths, 0), packed(k_lengths, 1), packed(k_lengths, 2)
    ends = tuple(Offsets.from_lengths(torch.tensor(n)) for n in (q_lengths, k_lengths))
    counts = torch.tensor([n for part in counts_of(q_lengths, k_lengths, seen) for n in part], dtype=torch.int32)
    return (q, k, v), ends, Seen(counts, chain=seen is None)


def loop(q: Tensor, k: Tensor, v: Tensor, ends: tuple[Offsets, Offsets], seen: Seen) -> Tensor:
    """One query at a time, in float64."""
    out, begins = torch.zeros(q.shape, dtype=torch.float64), ends[1].bounds[:-1].long()[ends[0].owner]
    for i, (begin, count) in enumerate(zip(begins.tolist(), seen.counts.tolist(), strict=True)):
        keys, values = (x[begin : begin + count].double() for x in (k, v))
        weight = torch.einsum("hd,khd->hk", q[i].double(), keys) / math.sqrt(q.shape[2])
        out[i] = torch.einsum("hk,khd->hd", weight.softmax(1), values)
    return out


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("q_lengths", "k_lengths", "seen"), [*SHAPES, *LONG])
def test_attention_on_stairs_equals_a_loop(q_lengths, k_lengths, seen, padded):
    inputs, ends, seen = made(q_lengths, k_lengths, seen)
    if padded:
        ends = tuple(replace(end, equal=False, longest=end.longest + 2) for end in ends)
    out = attention(*inputs, *ends, stairs=Stairs.of(seen, *ends))
    torch.testing.assert_close(out.double(), loop(*inputs, ends, seen), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("q_lengths", "k_lengths", "seen"), SHAPES)
def test_a_query_that_sees_nothing_gets_zeros_and_no_gradient_comes_from_beyond_the_stairs(q_lengths, k_lengths, seen):
    inputs, ends, seen = made(q_lengths, k_lengths, seen)
    q, k, v = (x.requires_grad_() for x in inputs)
    out = attention(q, k, v, *ends, stairs=Stairs.of(seen, *ends))
    assert (out[seen.counts == 0] == 0).all()
    places = torch.arange(len(k)) - ends[1].bounds[:-1].long()[ends[1].owner]
    for i, count in enumerate(seen.counts.tolist()):
        for grad in torch.autograd.grad(out[i].square().sum() + 0 * (k.sum() + v.sum()), (k, v), retain_graph=True):
            there = (ends[1].owner == ends[0].owner[i]) & (places < count)
            assert (grad[~there] == 0).all()
            assert grad.isfinite().all()


@pytest.mark.parametrize(("q_lengths", "k_lengths", "seen"), [*SHAPES, *LONG])
def test_the_first_asker_of_a_key_is_the_first_query_that_sees_it(q_lengths, k_lengths, seen):
    _, ends, found = made(q_lengths, k_lengths, seen)
    expected, begin = [], 0
    for counts, keys in zip(counts_of(q_lengths, k_lengths, seen), k_lengths, strict=True):
        for key in range(keys):
            expected.append(begin + next((i for i, count in enumerate(counts) if count > key), len(counts)))
        begin += len(counts)
    assert _askers(found.counts, *ends).tolist() == expected


def rotary_of(inputs: list[Tensor], ends: tuple[Offsets, Offsets], seen: Seen) -> Tensor:
    q, k, v = inputs
    ropes = tuple(rotary_table(400, q.shape[2])[400 - end.total :].to(q.device) for end in ends)
    return rotary_attention(q[:, None], torch.stack((k, v), 1), ends, ropes, stairs=Stairs.of(seen, *ends))


@pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="set TRITON_INTERPRET=1 where Triton is installed")
@pytest.mark.parametrize(("q_lengths", "k_lengths", "seen"), [*SHAPES, *LONG])
def test_the_kernels_interpreted_give_what_plain_torch_gives(q_lengths, k_lengths, seen, monkeypatch):
    kernels = pytest.importorskip("maskless.nn.cuda")
    inputs, ends, seen = made(q_lengths, k_lengths, seen)
    inputs = [x.requires_grad_() for x in inputs]
    plain = rotary_of(inputs, ends, seen)
    monkeypatch.setattr("maskless.nn.attention.KERNELS", kernels)
    monkeypatch.setattr("maskless.nn.attention._fits_kernels", lambda q: True)
    monkeypatch.setattr("maskless.nn.attention.has_kernels", lambda x: True)
    ours, weight = rotary_of(inputs, ends, seen), packed(q_lengths, 3)
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=0)
    gradients = [
        torch.autograd.grad((out * weight).sum() + 0 * sum(x.sum() for x in inputs), inputs) for out in (ours, plain)
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(("q_lengths", "k_lengths", "seen"), [*SHAPES, *LONG])
def test_stairs_on_a_gpu_are_those_of_float32(q_lengths, k_lengths, seen):
    inputs, ends, seen = made(q_lengths, k_lengths, seen)
    weight = packed(q_lengths, 3).bfloat16()

    def run(device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        own = [x.bfloat16().to(device, dtype).requires_grad_() for x in inputs]
        there = tuple(end.map(lambda x: x.to(device)) for end in ends)
        out = rotary_of(own, there, seen.map(lambda x: x.to(device)))
        return out, *torch.autograd.grad((out * weight.to(out)).sum() + 0 * sum(x.sum() for x in own), own)

    for ours, plain in zip(run("cuda", torch.bfloat16), run("cpu", torch.float32), strict=True):
        torch.testing.assert_close(ours.cpu().float(), plain, atol=3e-2, rtol=3e-2)
