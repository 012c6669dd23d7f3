"""The Triton kernels give what plain torch gives; without a GPU they run in Triton's interpreter, where Triton is."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from maskless.engine import kernels
from maskless.engine.kernels import Past, Shifts
from maskless.nn.attention import rotary_table
from maskless.problems import Offsets

HEADS, WIDTH, COLUMNS = 3, 16, 100
PASTS = [
    ([7, 7, 7], [2, 2, 2], False),
    ([7, 7, 7], [3, 3, 3], True),
    ([0, 5, 100], [2, 3, 20], False),
    ([4, 90, 30], [4, 20, 1], True),
    ([0, 0, 0], [1, 1, 1], False),
]


def test_the_kernels_in_the_interpreter():
    if find_spec("triton") is None:
        pytest.skip("needs Triton, which comes with torch's builds for CUDA")
    way = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, Path(__file__)], env=way, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_the_kernels_on_a_gpu():
    compare(torch.device("cuda"))


def compare(device: torch.device) -> None:
    """Every kernel against plain torch."""
    torch.manual_seed(0)
    for each in (compare_norms, compare_rotation, compare_attention, compare_draw, compare_digest):
        each(device)


def near(mine: torch.Tensor, plain: torch.Tensor) -> None:
    torch.testing.assert_close(mine.cpu(), plain, atol=1e-4, rtol=0)


def compare_norms(device: torch.device) -> None:
    from maskless.engine import cuda

    x, offset = torch.randn(5, 48), torch.randn(48)
    near(cuda.normalise(x.to(device), offset.to(device)), kernels.normalise(x, offset))
    few = cuda.FEW
    for cuda.FEW, lengths in ((100, [3, 3, 3]), (100, [2, 0, 7]), (1, [2, 0, 7])):  # few tokens, and many
        span, which = Offsets.from_lengths(torch.tensor(lengths)), torch.tensor([1, 0, 1], dtype=torch.int32)
        x, y, table = torch.randn(span.total, 20), torch.randn(span.total, 20), torch.randn(3, 2, 20)
        there = span.map(lambda z: z.to(device))
        plain_rows, rows = table.unbind(0), table.to(device).unbind(0)
        neutral = [z.expand(2, 20) for z in (torch.zeros(1, 20), torch.ones(1, 20))]
        for centred in (True, False):
            mine, plain = x.to(device, copy=True), x.clone()
            for more, (shift, scale) in (((y, plain_rows[0]), plain_rows[1:]), (None, neutral)):
                how = Shifts(shift, scale, which, span, centred)
                gated = None if more is None else (y.to(device), rows[0])
                there_how = Shifts(*(z.to(device) for z in how[:3]), there, centred)
                near(cuda.modulate(mine, gated, there_how), kernels.modulate(plain, more, how))
                near(mine, plain)
    cuda.FEW = few
    wide = torch.randn(7, 3, 20)
    mine, plain = wide.to(device, copy=True), wide.clone()
    cuda.rms_(mine[:, :2])
    kernels.rms_(plain[:, :2])
    near(mine, plain)
    wide = torch.randn(7, 2 * 1100)
    near(cuda.swiglu(wide.to(device)), kernels.swiglu(wide))


def compare_rotation(device: torch.device) -> None:
    from maskless.engine import cuda

    rope, positions = rotary_table(40, WIDTH), torch.randint(40, (5,))
    there, at = rope.to(device), positions.to(device)
    qkv = torch.randn(5, 3, HEADS, WIDTH)
    mine, plain = qkv.to(device, copy=True), qkv.clone()
    cuda.rotate_(mine[:, :2], at, there)
    kernels.rotate_(plain[:, :2], positions, rope)
    near(mine, plain)
    index = torch.tensor([3, 1, 9, 11, 4])  # of 3 rows with 4 columns each
    for kv in (torch.randn(5, 2, 2, HEADS, WIDTH), qkv[:, None, 1:]):
        plain = torch.zeros(kv.shape[1], 2, 3, HEADS, 4, WIDTH)
        mine = plain.to(device, copy=True)
        cuda.store(kv.to(device), at, there, index.to(device), mine)
        kernels.store(kv, positions, rope, index, plain)
        near(mine, plain)


def compare_attention(device: torch.device) -> None:
    from maskless.engine import cuda

    rope = rotary_table(40, WIDTH)
    for known, asked, causal in PASTS:
        lengths = torch.tensor(known, dtype=torch.int32)
        packed, offsets = Offsets.from_lengths(lengths), Offsets.from_lengths(torch.tensor(asked))
        q, place = torch.randn(offsets.total, HEADS, WIDTH), torch.randint(40, (offsets.total,))
        rows = torch.arange(3, dtype=torch.int32) * COLUMNS
        wide = torch.randn(packed.total, 2, 2, HEADS, WIDTH)[:, 1].unbind(1)  # a part of all keys and values
        for (k, v), begins in ((wide, packed.bounds[:-1]), (torch.randn(2, 3, HEADS, COLUMNS, WIDTH), rows)):
            here = [y.to(device) for y in (q, place, rope)]
            there_kv = [y.to(device) if y.ndim == 4 else y.to(device, copy=True) for y in (k, v)]
            past = Past(begins.to(device), lengths.to(device))
            mine = cuda.attend(*here, *there_kv, offsets.map(lambda y: y.to(device)), past, causal)
            near(mine, kernels.attend(q, place, rope, k, v, offsets, Past(begins, lengths), causal=causal))


def compare_draw(device: torch.device) -> None:
    from maskless.engine import cuda

    logits, bias = torch.randn(6, 5000) * 3, torch.randn(5000)
    bias[7] = bias[4990:] = -torch.inf
    logits[0], logits[1] = -torch.inf, 0
    logits[0, 4321] = 0
    edges = torch.zeros(6).double(), torch.full((6,), 1 - 2.0**-53).double()
    guided = torch.cat([logits.clamp_min(-50), torch.randn(6, 5000) * 3])
    sharp, weight = torch.tensor([1, 0.5, 1, 0.5, 1, 0.5]), torch.tensor([0, 0, 1.5, 2, 3, 0.1])
    # At the upper edge, guided logits are so far apart that rounding decides among what has no probability to speak of.
    for given, more, last in ((logits, (None, None), 2), (logits, (sharp, None), 2), (guided, (sharp, weight), 1)):
        here = [None if z is None else z.to(device) for z in more]
        for temperature in (1.0, 0.7):
            for u in (*torch.rand(10, 6, dtype=torch.float64), *edges[:last]):
                mine = cuda.draw(given.to(device), bias.to(device), temperature, u.to(device), *here)
                assert torch.equal(mine.cpu(), kernels.draw(given, bias, temperature, u, *more))
    for wrong, places in ((torch.nan, slice(None)), (torch.nan, 2500), (torch.inf, 7), (-torch.inf, slice(None))):
        broken = torch.zeros(3, 5000)
        broken[1, places] = wrong
        mine = cuda.draw(broken.to(device), torch.zeros(5000).to(device), 1.0, u[:3].to(device), None, None)
        assert torch.equal(mine.cpu(), kernels.draw(broken, torch.zeros(5000), 1.0, u[:3]))
        assert mine[1] >= 5000


def compare_digest(device: torch.device) -> None:
    from maskless.engine import cuda

    weights = [torch.randn(n).to(device) for n in (1, 77, 2 * cuda.BLOCK, cuda.BLOCK + 5)]
    weights.append(torch.randn(300, 2).to(device, torch.bfloat16))
    before = cuda.digest(weights).cpu()
    plain = []
    for weight in weights:
        for block in weight.flatten().view(torch.int32).cpu().long().split(cuda.BLOCK):
            plain.append((block * (2 * torch.arange(len(block)) + 1)).sum())
    assert torch.equal(before, torch.stack(plain))
    first, last = weights[2].data[[3, -1]].tolist()
    weights[2].data[3], weights[2].data[-1] = last, first  # in two blocks
    assert (cuda.digest(weights).cpu() != before).tolist() == [False, False, True, True, False, False, False]


if __name__ == "__main__":
    compare(torch.device("cpu"))
