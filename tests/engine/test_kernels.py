"""The Triton kernels give what plain torch gives; without a GPU they run in Triton's interpreter, where Triton is."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch

from maskless import logits as lg
from maskless.draw import Truncation
from maskless.engine import kernels
from maskless.engine.batch_state import BatchState
from maskless.engine.kernels import Landing, LinearMap, Past, Shifts, truncates
from maskless.engine.networks import fold
from maskless.engine.rounds import RoundKind, Rounds
from maskless.nn.attention import rotary_table
from maskless.nn.partition import PartitionConfig, PartitionTransformer
from maskless.plans import Plan
from maskless.problems import Offsets

sys.path.append(str(Path(__file__).parents[1]))  # run as a script too, in the interpreter
from tiny_networks import shaken

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
    for each in (
        *(compare_norms, compare_linears, compare_rotation, compare_attention, compare_new_keys, compare_places),
        *(compare_draw, compare_truncation, compare_rounds, compare_digest),
    ):
        each(device)


def near(mine: torch.Tensor, plain: torch.Tensor) -> None:
    torch.testing.assert_close(mine.cpu(), plain, atol=1e-4, rtol=0)


def compare_norms(device: torch.device) -> None:
    from maskless.engine import cuda
    from maskless.engine.cuda import norms

    x, offset = torch.randn(5, 48), torch.randn(48)
    near(cuda.normalise(x.to(device), offset.to(device)), kernels.normalise(x, offset))
    few = norms.FEW
    for norms.FEW, lengths in ((100, [3, 3, 3]), (100, [2, 0, 7]), (1, [2, 0, 7])):  # few tokens, and many
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
    norms.FEW = few
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


def compare_linears(device: torch.device) -> None:
    from maskless.engine import cuda

    for rows in (1, 30, 70, 300):
        x, offset, bias = torch.randn(rows, 48) + 0.3, torch.randn(48), torch.randn(80)
        matrix = LinearMap(torch.randn(80, 48), bias, None)
        matrix = matrix._replace(sums=matrix.weight.sum(1))
        for given in (matrix, matrix._replace(bias=None)):
            for gelu in (False, True) if given.bias is not None else (False,):
                there = [None if y is None else y.to(device) for y in (x, offset, *given)]
                near(cuda.norm_linear(*there, gelu=gelu), kernels.norm_linear(x, offset, given, gelu=gelu))
        a = torch.randn(rows, 80)
        mine, plain = x.to(device, copy=True), x.clone()
        cuda.add_linear(mine, a.to(device), matrix.weight.T.contiguous().to(device))
        kernels.add_linear(plain, a, matrix.weight.T.contiguous())
        near(mine, plain)


def compare_new_keys(device: torch.device) -> None:
    """Keys that are stored and attended to at once."""
    from maskless.engine import cuda

    rope = rotary_table(40, WIDTH)
    for known, new, _ in PASTS:
        lengths = torch.tensor([n + m for n, m in zip(known, new, strict=True)], dtype=torch.int32)
        offsets, begins = Offsets.from_lengths(torch.tensor(new)), torch.arange(3, dtype=torch.int32) * 128
        index = (begins + lengths - torch.tensor(new))[offsets.owner] + offsets.within
        qkv, place = torch.randn(offsets.total, 3, HEADS, WIDTH), torch.randint(40, (offsets.total,))
        for causal in (True, False):
            cache = torch.randn(2, 3, HEADS, 128, WIDTH)
            there, past = cache.to(device, copy=True), Past(begins.to(device), lengths.to(device))
            here = [y.to(device) for y in (qkv, place, rope)]
            mine = cuda.store_and_attend(*here, there, offsets.map(lambda y: y.to(device)), past, causal)
            how = {"causal": causal}
            near(mine, kernels.store_and_attend(qkv, place, rope, index, cache, offsets, Past(begins, lengths), **how))
            near(there, cache)


def compare_places(device: torch.device) -> None:
    from maskless.engine import cuda

    state = BatchState.empty(3, 50, torch.device("cpu"))
    state.order.copy_(torch.rand(3, 50).argsort(1))
    state.tokens.random_(1000)
    state.known.copy_(torch.tensor([20, 7, 30]))
    for length in (1, 6):
        span = Offsets.regular(3, length)
        for found, shift in ((state.last(span), -length), (state.next(span), 0), (state.following(span), 1 - length)):
            there = [y.to(device) for y in (state.order, state.tokens, state.known)]
            for mine, plain in zip(cuda.places(*there, length, 3 * length, shift), found, strict=True):
                assert torch.equal(mine.cpu(), plain)


def landed(logits: torch.Tensor, bias: torch.Tensor, filter: Truncation, device: torch.device, **more) -> torch.Tensor:
    """What the kernels draw, at places of their own, among tokens that stay.  (U, V) -> (U,)"""
    U, at = len(more["u"]), torch.randperm(20)[: len(more["u"])]

    def placed(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values.new_zeros(20).index_copy(0, at, values).to(device)

    fixed, tokens, largest = torch.ones(20, dtype=torch.bool), torch.full((20,), -1), torch.tensor(0)
    fixed[at] = False
    here = {name: placed(values) for name, values in more.items()}
    into = Landing(
        at=at.to(device),
        tokens=tokens.to(device),
        largest=largest.to(device),
        vocab=logits.shape[1],
        fixed=fixed.to(device),
        **here,
    )
    if truncates(filter):
        kernels.triton().draw_rows(logits.to(device), bias.to(device), filter, into)
    else:
        kernels.triton().draw_chunks(logits.to(device), bias.to(device), filter.temperature, into)
    found = into.tokens.cpu()
    assert (found[fixed] == -1).all()
    assert U == 1 or bool((found[at] <= into.largest.cpu()).all())
    return torch.where(into.largest.cpu() >= logits.shape[1], logits.shape[1], found[at])


def plainly(logits: torch.Tensor, bias: torch.Tensor, filter: Truncation, u, sharp=None, weight=None) -> torch.Tensor:
    return lg.draw(filter(kernels.combine(logits, bias, sharp, weight), u, u), u)


def compare_draw(device: torch.device) -> None:
    logits, bias = torch.randn(6, 5000) * 3, torch.randn(5000)
    bias[7] = bias[4990:] = -torch.inf
    logits[0], logits[1] = -torch.inf, 0
    logits[0, 4321] = 0
    edges = torch.zeros(6).double(), torch.full((6,), 1 - 2.0**-53).double()
    guided = torch.cat([logits.clamp_min(-50), torch.randn(6, 5000) * 3])
    sharp, weight = torch.tensor([1, 0.5, 1, 0.5, 1, 0.5]), torch.tensor([0, 0, 1.5, 2, 3, 0.1])
    # At the upper edge, guided logits are so far apart that rounding decides among what has no probability to speak of.
    for given, (a, b), last in ((logits, (None, None), 2), (logits, (sharp, None), 2), (guided, (sharp, weight), 1)):
        for filter in (Truncation(), Truncation(temperature=0.7), Truncation(top_k=40), Truncation(temperature=0)):
            for u in (*torch.rand(3, 6, dtype=torch.float64), *edges[:last]):
                mine = landed(given, bias, filter, device, u=u, sharp=a, weight=b)
                assert torch.equal(mine, plainly(given, bias, filter, u, a, b))
    for wrong, places in ((torch.nan, slice(None)), (torch.nan, 2500), (torch.inf, 7), (-torch.inf, slice(None))):
        broken = torch.zeros(3, 5000)
        broken[1, places] = wrong
        for filter in (Truncation(), Truncation(top_p=0.9)):
            assert (landed(broken, torch.zeros(5000), filter, device, u=u[:3]) >= 5000).all()


def compare_truncation(device: torch.device) -> None:
    """What is left is what sorting leaves: a draw from it is the same, ties included."""
    logits, bias = torch.randn(8, 300) * 2, torch.zeros(300)
    logits[0] = 0  # all are tied
    logits[1] = logits[1].round()
    logits[2, 5:] = -torch.inf
    for filter in (
        *(Truncation(top_p=p, temperature=t) for p in (0.03, 0.5, 0.9, 0.999) for t in (1.0, 0.6)),
        *(Truncation(top_k=k, top_p=p) for k in (1, 4, 50, 1000) for p in (None, 0.7)),
    ):
        for u in (*torch.rand(2, 8, dtype=torch.float64), torch.full((8,), 1 - 1e-9).double()):
            assert torch.equal(landed(logits, bias, filter, device, u=u), plainly(logits, bias, filter, u))


def in_rounds(network: PartitionTransformer, filter: Truncation, device: torch.device, draft: int) -> list:
    """Everything that exact rounds leave behind."""
    kind = RoundKind(rows=3, length=9, draft=draft, filter=filter, never=(2,), cells=100)
    run = Rounds(fold(network, torch.float32), kind, device=device, graphs=False)
    orders = torch.rand(2, 9, generator=torch.Generator().manual_seed(1)).argsort(1)
    plan = Plan(orders, torch.tensor([[1, *range(2, 10)], [4, *range(5, 9), *[9] * 4]]))
    tokens, begun = torch.arange(18).view(2, 9) % 7, torch.tensor([1, 4])
    run.begin(tokens, plan, lg.row_keys(3, torch.arange(2)), begun, torch.zeros(2, dtype=torch.long), filter)
    while bool((run.left() > 0).any()):
        run.round()
    tally = run.tally()
    return [*run.found(), torch.tensor([tally.rounds, tally.drafted, tally.accepted, tally.decided]), tally.nats]


def compare_rounds(device: torch.device) -> None:
    """Drafts and checks by kernels are those of plain torch, in whole rounds: the network's kernels too."""
    config = PartitionConfig(vocab=11, length=9, width=32, heads=2, encoder=1, decoder=1, context="ordered")
    network = shaken(PartitionTransformer(config), 0.3).to(device)
    filters = Truncation(), Truncation(temperature=0.8, top_p=0.7), Truncation(top_k=3), Truncation(temperature=0)
    for filter, draft in zip(filters, (4, 3, 1, 4), strict=True):
        with mock.patch.object(kernels, "fuses", return_value=False):
            plain = in_rounds(network, filter, device, draft)
        with mock.patch.object(kernels, "on_cuda", return_value=True):
            mine = in_rounds(network, filter, device, draft)
        for one, other in zip(mine[:2], plain[:2], strict=True):
            assert torch.equal(one, other)
        assert torch.equal(mine[3], plain[3])
        torch.testing.assert_close(mine[2], plain[2], atol=1e-4, rtol=0, equal_nan=True)
        assert mine[4] == pytest.approx(plain[4], abs=1e-3)


def compare_digest(device: torch.device) -> None:
    from maskless.engine import cuda
    from maskless.engine.cuda.digest import BLOCK

    weights = [torch.randn(n).to(device) for n in (1, 77, 2 * BLOCK, BLOCK + 5)]
    weights.append(torch.randn(300, 2).to(device, torch.bfloat16))
    before = cuda.digest(weights).cpu()
    plain = []
    for weight in weights:
        for block in weight.flatten().view(torch.int32).cpu().long().split(BLOCK):
            plain.append((block * (2 * torch.arange(len(block)) + 1)).sum())
    assert torch.equal(before, torch.stack(plain))
    first, last = weights[2].data[[3, -1]].tolist()
    weights[2].data[3], weights[2].data[-1] = last, first  # in two blocks
    assert (cuda.digest(weights).cpu() != before).tolist() == [False, False, True, True, False, False, False]


if __name__ == "__main__":
    compare(torch.device("cpu"))
