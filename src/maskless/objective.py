"""Objectives: batches of problems with their answers and weights, and the variational bound.

A task is built on the CPU from tokens and uniform draws, so it is the same on every device, and a process can build
its own rows of a global batch. What differs between PGM, MDLM and MDLM with complementary masks is only the task and
the network: complementary MDLM is the masked network on PGM's task. A chain is ours: it goes on from two groups to as
many as there are tokens, and its likelihood along an order is exact.

Shapes: B sequences, L length, U targets, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from maskless.logits import row_keys, uniforms
from maskless.nn import Network
from maskless.nn.causal import CausalTransformer
from maskless.nn.loss import answer_costs
from maskless.nn.partition import chains
from maskless.problems import Offsets, Problems, partition, split
from maskless.problems import chain as chained
from maskless.schedule import bounded, released, stratified

SHIFT, SPLIT = range(2)  # purposes of random numbers


@dataclass(frozen=True)
class Task:
    """Problems with the right answer at each target and its weight in the loss."""

    problems: Problems
    answers: Tensor  # (U,)
    weights: Tensor  # (U,) float32

    def labelled(self, labels: Tensor | None) -> Task:
        """The same task with the class label of each sequence.  (B,)"""
        return replace(self, problems=self.problems.labelled(labels))

    def map(self, change: Callable[[Tensor], Tensor]) -> Task:
        """The same task with every tensor changed: moved, pinned."""
        return Task(self.problems.map(change), change(self.answers), change(self.weights))


def pgm(tokens: Tensor, t: Tensor, u: Tensor, valid: Tensor) -> Task:
    """Both groups predict each other; a token weighs one over the probability of the group it fell in, halved.

    tokens (B, L); t (B,) and u (B, L) uniform draws in [0, 1); valid (B, L): which tokens count.  PGM, Sec. 3.1
    (The paper's table of cases swaps the two weights; its prose is right.) The halves average two bounds.
    """
    return _two_groups(tokens, bounded(t), u, valid)


def pgm_released(tokens: Tensor, t: Tensor, u: Tensor, valid: Tensor) -> Task:
    """As `pgm`, with the times of the released code: the weight of the first group has no bound as t nears 1.

    (There alpha is 1 - 0.999 t, here 1 - t, so that the expected weight of every token is 1.)
    """
    return _two_groups(tokens, released(t), u, valid)


def pgm_exact(tokens: Tensor, t: Tensor, u: Tensor, valid: Tensor) -> Task:
    """As `pgm`, but the draw decides how large the groups are, and both count the same whatever their sizes.

    The first group is n = floor(t L) tokens, and the mean over each group counts L/2: every sequence weighs exactly L,
    and the same bound is estimated without the noise of random sizes. With n = 0 the only group counts L.
    """
    L = tokens.shape[1]
    first = (t * L).long()
    alone = (first == 0).double()
    w_second = L / (L - first) * (0.5 + 0.5 * alone)
    w_first = L / (2 * first).clamp_min(1)
    return _weighed(tokens, u.argsort(1), first, torch.stack([w_second, w_first], 1), valid)


def mdlm(tokens: Tensor, t: Tensor, u: Tensor, valid: Tensor) -> Task:
    """The hidden tokens are predicted from the others with weight 1/t.  MDLM; PGM, Eq. 1"""
    t = released(t)
    starts = (u < 1 - t[:, None]).sum(1)
    problems, index = split(tokens, u.argsort(1), starts, torch.full_like(starts, tokens.shape[1]))
    weights = (1 / t)[problems.target_offsets.owner] * valid.flatten()[index]
    return Task(problems, tokens.flatten()[index], weights.float())


def causal(tokens: Tensor, t: Tensor, u: Tensor, valid: Tensor) -> Task:
    """Every token is predicted from those before it, with weight 1."""
    B, L = tokens.shape
    places = torch.arange(L).expand(B, L)
    problems = Problems(
        tokens=tokens[:, :-1].flatten(),
        positions=places[:, :-1].flatten(),
        offsets=Offsets.regular(B, L - 1),
        targets=places.flatten(),
        target_offsets=Offsets.regular(B, L),
    )
    return Task(problems, tokens.flatten(), valid.flatten().float())


def chain(draw: Callable[[Tensor, Tensor], Tensor], *, given: int = 0) -> Objective:
    """What builds tasks where each token is predicted from those before it in the order of its row, with weight 1.

    draw: t (B,) and u (B, L) -> orders (B, L), as `Mixture.draw`. given: so many first positions of every order (the
    BOS of an image) are never predicted.
    """

    def build(tokens: Tensor, t: Tensor, u: Tensor, valid: Tensor) -> Task:
        B, L = tokens.shape
        problems, index = chained(tokens, draw(t, u), torch.full((B,), given), torch.full((B,), L))
        return Task(problems, tokens.flatten()[index], valid.flatten()[index].float())

    return build


def pgm_arccos(tokens: Tensor, t: Tensor, u: Tensor, valid: Tensor) -> Task:
    """Both groups of an image predict each other, and every token weighs 1; only the sizes of the groups are drawn.

    The first token (BOS) is in the first group and is never predicted; any other is in the second group with
    probability arccos(t) / (pi/2). u[:, 0] is not used.  PGM, Sec. 5.2
    """
    order, first = _behind_bos(t, u)
    problems, index = partition(tokens, order, first, given=1)
    return Task(problems, tokens.flatten()[index], valid.flatten()[index].float())


def maskgit(tokens: Tensor, t: Tensor, u: Tensor, valid: Tensor) -> Task:
    """The second group of `pgm_arccos` is hidden and is predicted from the first, every token with weight 1.

    (The released code also counts the tokens that the network sees.)
    """
    order, first = _behind_bos(t, u)
    problems, index = split(tokens, order, first, torch.full_like(first, tokens.shape[1]))
    return Task(problems, tokens.flatten()[index], valid.flatten()[index].float())


def drop_labels(labels: Tensor, u: Tensor, p: float, dropped: int) -> Tensor:
    """Labels with a share p of them replaced by the id that says nothing, for classifier-free guidance.

    labels (B,), u (B,) uniform draws in [0, 1) -> (B,)
    """
    return labels.masked_fill(u < p, dropped)


Objective = Callable[[Tensor, Tensor, Tensor, Tensor], Task]
OBJECTIVES: dict[str, Objective] = {
    "pgm": pgm,
    "pgm-released": pgm_released,
    "pgm-exact": pgm_exact,
    "mdlm": mdlm,
    "causal": causal,
    "pgm-arccos": pgm_arccos,
    "maskgit": maskgit,
}


def noise(rows: int, length: int, *, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Stratified times and uniform draws for all rows of the global batch of a step.  -> (N,), (N, L) float64

    Every process draws the same and takes its own rows, so the loss does not depend on how many processes there are.
    """
    generator = torch.Generator().manual_seed(mixed_seed(seed, step))
    return stratified(rows, generator=generator), torch.rand(rows, length, generator=generator, dtype=torch.float64)


def mixed_seed(*numbers: int) -> int:
    """One seed from several numbers. torch's CPU generator keeps 32 bits of a seed, so they must be mixed well."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


@torch.no_grad()
def bound(
    network: Network,
    tokens: Tensor,
    known: Tensor | None = None,
    *,
    counted: Tensor | None = None,
    labels: Tensor | None = None,
    samples: int = 8,
    seed: int = 0,
    keys: Tensor | None = None,
) -> Tensor:
    """A variational bound on -log p(unknown tokens | known tokens) of each sequence, in nats.  (B, L) -> (B,) float64

    The bound is the sum over n of the mean cost of the hidden tokens when n of the m unknown ones are shown. Each of
    the `samples` shows a random n (stratified over 0 to m-1) and lets both groups predict each other, which counts n
    and m-n at once; a model that gives every token the same cost has no variance at all. A causal network is exact. One
    that answers chains has all n at once: the bound is then the mean of -log p along `samples` random orders.
    counted (B, L): which tokens' costs count (all but padding, say). labels (B,): of a network with classes.
    keys (B,), from `row_keys`, take the seed's place: a row's splits then depend on its own key and no other row.
    """
    known = torch.zeros_like(tokens, dtype=torch.bool) if known is None else known
    counted = ~known if counted is None else counted & ~known
    if isinstance(network, CausalTransformer):
        if not bool((known == (torch.arange(known.shape[1]) < known.sum(1, keepdim=True))).all()):
            raise ValueError("a causal model scores tokens after a prompt, not a gap that has known tokens after it")
        return _causal_cost(network, tokens, counted)
    if chains(network):
        every = orders_of(network, tokens, known, counted=counted, labels=labels, orders=samples, seed=seed, keys=keys)
        return every.mean(0)
    generator = torch.Generator().manual_seed(seed)
    given, m = known.sum(1), (~known).sum(1)
    total = torch.zeros(len(tokens), dtype=torch.float64)
    shift = torch.rand(len(tokens), generator=generator, dtype=torch.float64)
    if keys is not None:
        shift = uniforms(keys, torch.zeros_like(keys), SHIFT)
    columns = torch.arange(tokens.shape[1])
    for sample in range(samples):
        n = (m * (sample + shift) / samples).long()  # shown to the first problem: 0 .. m-1
        u = torch.rand(tokens.shape, generator=generator)
        if keys is not None:
            u = uniforms(keys[:, None], sample * len(columns) + columns, SPLIT)
        order = (u + (~known).float()).argsort(1)
        for part, context, targets in ((order, n, m - n), (_swapped(order, given, n, m), m - n, n)):
            problems, index = split(tokens, part, given + context, given + context + targets)
            problems = problems.labelled(labels)
            cost = answer_costs(network, problems, tokens.flatten()[index]) * counted.flatten()[index]
            mean = torch.zeros_like(total).index_add(0, problems.target_offsets.owner, cost) / targets.clamp_min(1)
            total += m * mean / torch.where(n == 0, 1, 2)
    return total / samples


def orders_of(
    network: Network,
    tokens: Tensor,
    known: Tensor,
    *,
    counted: Tensor,
    labels: Tensor | None = None,
    orders: int,
    seed: int = 0,
    keys: Tensor | None = None,
) -> Tensor:
    """-log p(unknown tokens | known tokens) along some random orders, in nats.  (B, L) -> (orders, B) float64"""
    keys = row_keys(seed, torch.arange(len(tokens))) if keys is None else keys
    columns, found = torch.arange(tokens.shape[1]), []
    for number in range(orders):
        u = uniforms(keys[:, None], number * len(columns) + columns, SPLIT)
        order = (u + (~known).double()).argsort(1)
        cost = along(network, tokens, order, known.sum(1), labels=labels)
        found.append((cost * counted).sum(1))
    return torch.stack(found)


@torch.no_grad()
def along(
    network: Network,
    tokens: Tensor,
    order: Tensor,
    given: Tensor,
    *,
    labels: Tensor | None = None,
    seen: Tensor | None = None,
) -> Tensor:
    """The cost of each token along an order, exactly: -log p given all before it, 0 for given ones.  -> (B, L) float64

    tokens (B, L), order (B, L), given (B,): how many first positions of an order are known. seen (B, L): how many
    positions of its order each place of it sees, where a sampler decides several at once. A network that answers chains
    needs one pass, another one a call for each place.
    """
    total, ends = torch.zeros(tokens.numel(), dtype=torch.float64), torch.full_like(given, tokens.shape[1])
    if chains(network):
        problems, index = chained(tokens, order, given, ends, seen)
        total[index] = answer_costs(network, problems.labelled(labels), tokens.flatten()[index])
        return total.view(tokens.shape)
    for place in range(int(given.min()), tokens.shape[1]):
        rows = (given <= place).nonzero()[:, 0]
        starts = torch.full_like(rows, place) if seen is None else seen[rows, place]
        problems, _ = split(tokens[rows], order[rows], starts, starts + 1)
        problems = replace(problems, targets=order[rows, place], labels=None if labels is None else labels[rows])
        index = rows * tokens.shape[1] + order[rows, place]
        total[index] = answer_costs(network, problems, tokens.flatten()[index])
    return total.view(tokens.shape)


@torch.no_grad()
def paper_bound(network: Network, tokens: Tensor, *, counted: Tensor | None = None, seed: int = 0) -> Tensor:
    """The paper's estimator: one time per sequence (stratified over rows), second group only, weight 1/t.  -> (B,)"""
    counted = torch.ones_like(tokens, dtype=torch.bool) if counted is None else counted
    if isinstance(network, CausalTransformer):
        return _causal_cost(network, tokens, counted)
    t, u = noise(*tokens.shape, seed=seed, step=0)
    task = mdlm(tokens, t, u, counted)
    cost = answer_costs(network, task.problems, task.answers) * task.weights.double()
    return torch.zeros(len(tokens), dtype=torch.float64).index_add(0, task.problems.target_offsets.owner, cost)


def _behind_bos(t: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """An order that begins with BOS, and how many of it are in the first group.  (B,), (B, L) -> (B, L), (B,)"""
    u = torch.cat([torch.full_like(u[:, :1], -1), u[:, 1:]], 1)
    return u.argsort(1), (u < 1 - t.arccos()[:, None] / (math.pi / 2)).sum(1)


def _two_groups(tokens: Tensor, t: Tensor, u: Tensor, valid: Tensor) -> Task:
    first = (u < 1 - t[:, None]).sum(1)  # each token falls in the first group with probability alpha = 1 - t
    return _weighed(tokens, u.argsort(1), first, torch.stack([0.5 / t, 0.5 / (1 - t)], 1), valid)


def _weighed(tokens: Tensor, order: Tensor, first: Tensor, weights: Tensor, valid: Tensor) -> Task:
    """The partition's problems; weights (B, 2): of the targets of a row's two problems (second group, first group)."""
    problems, index = partition(tokens, order, first)
    each = weights.flatten()[problems.target_offsets.owner] * valid.flatten()[index]
    return Task(problems, tokens.flatten()[index], each.float())


def _swapped(order: Tensor, given: Tensor, n: Tensor, m: Tensor) -> Tensor:
    """The order with the first n unknown positions moved behind the other m-n.  (B, L) -> (B, L)"""
    column = torch.arange(order.shape[1]) - given[:, None]
    cycled = (column + n[:, None]) % m[:, None].clamp_min(1)
    return order.gather(1, torch.where(column < 0, column, cycled) + given[:, None])


def _causal_cost(network: Network, tokens: Tensor, counted: Tensor) -> Tensor:
    task = causal(tokens, tokens, tokens, counted)
    cost = answer_costs(network, task.problems, task.answers) * task.weights.double()
    return cost.view(tokens.shape).sum(1)
