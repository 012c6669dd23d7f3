"""The Triton kernels give what plain torch gives; without a GPU they run in Triton's interpreter, where Triton is."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from maskless.engine import kernels
from maskless.engine.kernels import Past
from maskless.nn.attention import rotary_table
from maskless.problems import Offsets

HEADS, WIDTH, SLOTS = 3, 16, 100
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
    """Every kernel against its plain body."""
    from maskless.engine import cuda

    torch.manual_seed(0)

    def near(mine: torch.Tensor, plain: torch.Tensor) -> None:
        torch.testing.assert_close(mine.cpu(), plain, atol=2e-5, rtol=0)

    x, offset = torch.randn(5, 48), torch.randn(48)
    near(cuda.normalise(x.to(device), offset.to(device)), kernels.normalise(x, offset))
    rope, positions = rotary_table(40, WIDTH), torch.randint(40, (5,))
    there, at = rope.to(device), positions.to(device)
    qkv = torch.randn(5, 3, HEADS, WIDTH)
    mine, plain = qkv.to(device, copy=True), qkv.clone()
    cuda.rotate_(mine[:, :2], at, there)
    kernels.rotate_(plain[:, :2], positions, rope)
    near(mine, plain)
    slots = torch.tensor([3, 1, 9, 11, 4])  # of 3 rows with 4 slots each
    for kv in (torch.randn(5, 2, 2, HEADS, WIDTH), qkv[:, None, 1:]):
        plain = torch.zeros(kv.shape[1], 2, 3, HEADS, 4, WIDTH)
        mine = plain.to(device, copy=True)
        cuda.store(kv.to(device), at, there, slots.to(device), mine)
        kernels.store(kv, positions, rope, slots, plain)
        near(mine, plain)
    for known, asked, causal in PASTS:
        lengths = torch.tensor(known, dtype=torch.int32)
        packed, offsets = Offsets.from_lengths(lengths), Offsets.from_lengths(torch.tensor(asked))
        q, place = torch.randn(offsets.total, HEADS, WIDTH), torch.randint(40, (offsets.total,))
        rows = torch.arange(3, dtype=torch.int32) * SLOTS
        wide = torch.randn(packed.total, 2, 2, HEADS, WIDTH)[:, 1].unbind(1)  # a part of all keys and values
        for (k, v), begins in ((wide, packed.bounds[:-1]), (torch.randn(2, 3, HEADS, SLOTS, WIDTH), rows)):
            here = [y.to(device) for y in (q, place, rope)]
            there_kv = [y.to(device) if y.ndim == 4 else y.to(device, copy=True) for y in (k, v)]
            past = Past(begins.to(device), lengths.to(device))
            mine = cuda.attend(*here, *there_kv, offsets.map(lambda y: y.to(device)), past, causal)
            near(mine, kernels.attend(q, place, rope, k, v, offsets, Past(begins, lengths), causal=causal))
    logits, bias = torch.randn(6, 5000) * 3, torch.randn(5000)
    bias[7] = bias[4990:] = -torch.inf
    logits[0], logits[1] = -torch.inf, 0
    logits[0, 4321] = 0
    for temperature in (1.0, 0.7):
        for u in (
            *torch.rand(10, 6, dtype=torch.float64),
            torch.zeros(6).double(),
            torch.full((6,), 1 - 2.0**-53).double(),
        ):
            mine = cuda.draw(logits.to(device), bias.to(device), temperature, u.to(device))
            assert torch.equal(mine.cpu(), kernels.draw(logits, bias, temperature, u))


if __name__ == "__main__":
    compare(torch.device("cpu"))
