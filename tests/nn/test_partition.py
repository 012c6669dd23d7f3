"""The Partition Transformer: nothing leaks, problems are what they say, and released logits come out again."""

import pytest
import torch
from torch import Tensor, nn

from maskless.nn import autocast
from maskless.nn.partition import PartitionTransformer, segment_logsumexp, segment_mean, sinusoids
from maskless.problems import Offsets, dense, partition, split
from tiny_networks import check_groups

L = 8
SPLITS = [pytest.param(n, id=str(n)) for n in ([3, 5], [0, 8], [1, 7])]


def batch(sizes: list[int], vocab: int = 10) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocab, (len(sizes), L), generator=generator)
    return tokens, torch.rand(len(sizes), L, generator=generator).argsort(1), torch.tensor(sizes)


def predictable(logits: Tensor) -> Tensor:
    """All but the last id, which is -inf in a network with a mask id."""
    return logits[:, :-1]


@pytest.mark.parametrize("sizes", SPLITS)
def test_a_changed_token_moves_the_logits_of_the_other_group_and_no_others(network, sizes):
    tokens, order, n = batch(sizes)

    def answer(tokens: Tensor) -> tuple[Tensor, Tensor]:
        problems, index = partition(tokens, order, n)
        return predictable(network(problems)), index

    check_groups(answer, tokens, order, sizes)


@torch.no_grad()
@pytest.mark.parametrize("sizes", SPLITS)
def test_problems_of_a_partition_equal_sampling_problems(network, sizes):
    tokens, order, n = batch(sizes)
    problems, _ = partition(tokens, order, n)
    logits = network(problems).split(problems.target_offsets.lengths.tolist())
    whole = torch.full_like(n, L)
    swapped = torch.stack([o.roll(-size) for o, size in zip(order, sizes, strict=True)])
    for parity, sequence, start in ((0, order, n), (1, swapped, L - n)):
        step, _ = split(tokens, sequence, start, whole)
        torch.testing.assert_close(torch.cat(logits[parity::2]), network(step), atol=1e-5, rtol=0)
        for b in range(len(tokens)):
            context, targets = sequence[b : b + 1, : start[b]], sequence[b : b + 1, start[b] :]
            alone = network(dense(tokens[b : b + 1].gather(1, context), context, targets))
            torch.testing.assert_close(logits[2 * b + parity], alone, atol=1e-5, rtol=0)


@torch.no_grad()
def test_padding_of_a_dense_row_is_not_seen(network):
    tokens, positions, _ = batch([0, 0, 0])
    targets, lengths = torch.tensor([[6, 1], [0, 3], [4, 4]]), torch.tensor([5, 0, 2])
    padded = network(dense(tokens, positions, targets, lengths))
    beyond = torch.arange(L) >= lengths[:, None]
    changed = network(dense(tokens.masked_fill(beyond, 9), positions.masked_fill(beyond, 0), targets, lengths))
    assert torch.equal(padded, changed)
    for b, n in enumerate(lengths.tolist()):
        alone = network(dense(tokens[b : b + 1, :n], positions[b : b + 1, :n], targets[b : b + 1]))
        torch.testing.assert_close(padded[2 * b : 2 * b + 2], alone, atol=1e-5, rtol=0)


@torch.no_grad()
def test_targets_do_not_see_one_another(network):
    tokens, order, _ = batch([0])
    context, targets = order[:, :3], order[:, 3:]
    together = network(dense(tokens.gather(1, context), context, targets))
    for i in range(targets.shape[1]):
        alone = network(dense(tokens.gather(1, context), context, targets[:, i : i + 1]))
        torch.testing.assert_close(together[i : i + 1], alone, atol=1e-5, rtol=0)


def test_an_empty_context_gives_finite_logits_and_gradients(network):
    none = torch.empty(2, 0, dtype=torch.long)
    logits = predictable(network(dense(none, none, torch.arange(2 * 3).view(2, 3))))
    assert logits.isfinite().all()
    logits.logsumexp(-1).sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in network.parameters())


def encode(network: nn.Module, tokens: Tensor, positions: Tensor) -> Tensor:
    """What the encoder gives for the context.  (n,), (n,) -> (n, D)"""
    seen = []
    handle = network.encoder[-1].register_forward_hook(lambda module, args, out: seen.append(out))
    network(dense(tokens[None], positions[None], torch.zeros(1, 1, dtype=torch.long)))
    handle.remove()
    return seen[0]


@torch.no_grad()
@pytest.mark.parametrize(("kind", "frozen"), [("ordered", True), ("position", False)])
def test_only_an_ordered_context_stays_as_it_was_when_tokens_are_added(tiny, kind, frozen):
    network = tiny(kind)
    tokens, order, _ = batch([0])
    whole = encode(network, tokens[0, order[0]], order[0])
    for n in range(1, L):
        same = torch.allclose(encode(network, tokens[0, order[0, :n]], order[0, :n]), whole[:n], atol=1e-6, rtol=0)
        assert same == frozen


@torch.no_grad()
def test_the_order_of_the_context_matters_only_to_an_ordered_one(network):
    tokens, order, _ = batch([0])
    context, targets = order[:, :6], order[:, 6:]
    asked = (dense(tokens.gather(1, places), places, targets) for places in (context, context.flip(1)))
    one, other = (predictable(network(problems)) for problems in asked)
    difference = (one - other).abs().max()
    ordered = isinstance(network, PartitionTransformer) and network.config.context == "ordered"
    assert difference > 1e-4 if ordered else difference < 1e-6


@torch.no_grad()
def test_dropout_acts_in_training_only(network):
    problems, _ = partition(*batch([3, 5]))
    assert torch.equal(network(problems), network(problems))
    network.train()
    assert not torch.equal(network(problems), network(problems))


@torch.no_grad()
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["position", "mean", "logsumexp", "ordered", "masked"])
def test_logits_on_a_gpu_in_half_precision_are_those_of_the_cpu(tiny, kind):
    network = tiny(kind, width=32)
    tokens, order, _ = batch([0, 0, 0])
    some, ends = torch.tensor([0, 3, 5]), torch.tensor([2, 8, 5])
    asked = [
        partition(tokens, order, torch.tensor([3, 0, 8]))[0],
        split(tokens, order, some, ends)[0],
        split(tokens, order, 0 * some, torch.tensor([2, 1, 8]))[0],  # nothing is known yet, and targets are ragged
        split(tokens, order, 0 * some, 0 * some + 2)[0],
    ]
    expected = [predictable(network(problems)) for problems in asked]
    network.cuda()
    with autocast(torch.device("cuda")):
        found = [predictable(network(problems.to("cuda"))).float().cpu() for problems in asked]
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.std() > 0.1
        torch.testing.assert_close(ours, theirs, atol=3e-2, rtol=0)


@torch.no_grad()
def test_an_id_that_is_never_predicted_has_probability_zero(tiny):
    problems, _ = partition(*batch([3, 5]))
    open_, closed = tiny("position")(problems), tiny("position", never=4)(problems)
    assert (closed[:, 4] == -torch.inf).all()
    others = torch.arange(11) != 4
    assert torch.equal(closed[:, others], open_[:, others])


@pytest.mark.parametrize(("aggregate", "one"), [(segment_mean, Tensor.mean), (segment_logsumexp, Tensor.logsumexp)])
def test_segment_aggregates_equal_those_of_each_segment(aggregate, one):
    lengths = [3, 0, 1, 4, 0]
    x = (30 * torch.randn(8, 5, generator=torch.Generator().manual_seed(0))).requires_grad_()
    out = aggregate(x, Offsets.from_lengths(torch.tensor(lengths)))
    expected = [one(part, 0) if len(part) else torch.zeros(5) for part in x.split(lengths)]
    torch.testing.assert_close(out, torch.stack(expected))
    ours, theirs = (torch.autograd.grad(y.square().sum(), x)[0] for y in (out, torch.stack(expected)))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)  # exp(x) errs by eps |x|, and x is near 100


def test_position_vectors_are_cosines_then_sines():
    places = sinusoids(9, 6).double()
    for i in range(9):
        for j in range(3):
            angle = torch.tensor(i / 10_000 ** (2 * j / 6)).double()
            both = torch.stack([angle.cos(), angle.sin()])
            torch.testing.assert_close(places[i, [j, 3 + j]], both, atol=1e-6, rtol=0)
