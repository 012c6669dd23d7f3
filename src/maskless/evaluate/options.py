"""How likely a text is after another: the options of a question, the last word of a passage, a whole document.

A model that writes from left to right, also one trained on chains, scores the target exactly, in one pass. For another
it is scored given the prefix by a bound in which only the target is ever hidden: of one or two tokens it is exact, and
otherwise has far less variance than the paper's form, which hides the prefix too. The random splits of a request come
from the seed and its number among the requests, so its score is the same at any batch size.

Shapes: B requests of one length, L length.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from maskless.logits import row_keys
from maskless.nn import Network, autocast, device_of
from maskless.nn.blocks import Head
from maskless.nn.causal import CausalTransformer
from maskless.nn.loss import chunk_size
from maskless.nn.threads import threads_for_pass
from maskless.objective import bound
from maskless.problems import chain, dense

Request = tuple[list[int], list[int]]  # the ids of a prefix and of what follows it
OnBatch = Callable[[int], None]


@torch.no_grad()
def exact(
    network: nn.Module, requests: Sequence[Request], *, batch: int = 32, on_batch: OnBatch | None = None
) -> list[tuple[float, bool]]:
    """log p(target | prefix) from left to right in nats, and whether the target is the greedy answer, in one pass.

    Of a causal network, or of one that answers chains.
    """
    scores = [(0.0, False)] * len(requests)
    device = device_of(network)
    for numbers, tokens, starts in _laid_out(requests, batch, on_batch):
        B, L = tokens.shape
        problems, index = chain(tokens, torch.arange(L).expand(B, L), starts, torch.full((B,), L))
        answers = tokens.flatten()[index].to(device)
        with autocast(device), threads_for_pass(network, problems):
            found = network(problems.to(device), partial(_judged, answers=answers)).cpu()
        parts = zip(*(part.split((L - starts).tolist()) for part in found.unbind(1)), strict=True)
        for i, (log_p, best) in zip(numbers, parts, strict=True):
            scores[i] = float(log_p.sum()), bool(best.all()) and len(best) > 0
    return scores


def _judged(head: Head, x: Tensor, condition: Tensor, *, answers: Tensor) -> Tensor:
    """log p of each answer, and whether no id is more likely; the logits of all are never there at once.  -> (U, 2)"""
    rows, found = chunk_size(len(x), head.linear.out_features, torch.float32), []
    for begin in range(0, len(x), rows):
        part = slice(begin, begin + rows)
        logits = head(x[part], condition if len(condition) == 1 else condition[part]).float()
        log_p = logits.log_softmax(-1).gather(1, answers[part, None])[:, 0].double()
        found.append(torch.stack([log_p, (logits.argmax(-1) == answers[part]).double()], 1))
    return torch.cat(found) if found else x.new_zeros(0, 2, dtype=torch.float64)


def conditional(
    network: Network,
    requests: Sequence[Request],
    *,
    samples: int = 32,
    batch: int = 32,
    seed: int = 0,
    on_batch: OnBatch | None = None,
) -> list[float]:
    """log p(target | prefix) of each request, in nats: a bound from `samples` splits, exact for a causal network."""
    scores = [0.0] * len(requests)
    for numbers, tokens, starts in _laid_out(requests, batch, on_batch):
        known = torch.arange(tokens.shape[1]) < starts[:, None]
        longest = int((~known).sum(1).max())
        keys = row_keys(seed, torch.tensor(numbers))
        with autocast(device_of(network)):
            found = -bound(network, tokens, known, samples=1 if longest == 1 else samples, keys=keys)
        for i, score in zip(numbers, found.tolist(), strict=True):
            scores[i] = score
    return scores


def joint(network: Network, requests: Sequence[Request], **how: Any) -> list[float]:
    """The paper's form: log p(prefix and target together) per token, a bound; options are compared by it.

    (The released code draws one group at 1,024 times; here both groups of `samples` splits, with the same mean.)
    how: keywords of `conditional`.
    """
    whole: list[Request] = [([], prefix + target) for prefix, target in requests]
    found = conditional(network, whole, **how)
    return [score / max(1, len(target)) for score, (_, target) in zip(found, whole, strict=True)]


def greedy(network: Network, requests: Sequence[Request], *, batch: int = 32) -> list[bool]:
    """Whether the most likely tokens after each prefix, one after another, are those of the target."""
    right = [bool(target) for _, target in requests]
    for place in range(max((len(target) for _, target in requests), default=0)):
        alive = [i for i, (_, target) in enumerate(requests) if right[i] and place < len(target)]
        each = (requests[i] for i in alive)
        step = [(prefix + target[:place], target[place : place + 1]) for prefix, target in each]
        for i, found in zip(alive, _in_one_step(network, step, batch=batch), strict=True):
            right[i] = found
    return right


def at_once(network: Network, requests: Sequence[Request], *, batch: int = 32) -> list[bool]:
    """Whether the most likely tokens after each prefix, all decided in one step, are those of the target."""
    return (greedy if isinstance(network, CausalTransformer) else _in_one_step)(network, requests, batch=batch)


@torch.no_grad()
def _in_one_step(network: Network, requests: Sequence[Request], *, batch: int) -> list[bool]:
    right, device = [False] * len(requests), device_of(network)
    for numbers in _alike(requests, batch, exactly=True):
        prefixes, targets = zip(*(requests[i] for i in numbers), strict=True)
        tokens, n, m = torch.tensor(prefixes, dtype=torch.long), len(prefixes[0]), len(targets[0])
        places = torch.arange(n + m).expand(len(tokens), n + m)
        problems = dense(tokens, places[:, :n], places[:, n:]).to(device)
        with autocast(device), threads_for_pass(network, problems):
            best = network(problems).argmax(-1).view(len(tokens), m).tolist()
        for i, found in zip(numbers, best, strict=True):
            right[i] = bool(found) and found == requests[i][1]
    return right


def _laid_out(
    requests: Sequence[Request], batch: int, on_batch: OnBatch | None
) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """The numbers of requests of one length, their tokens (B, L), and where each target begins (B,)."""
    for numbers in _alike(requests, batch):
        rows = [requests[i] for i in numbers]
        tokens = torch.tensor([prefix + target for prefix, target in rows], dtype=torch.long)
        yield numbers, tokens, torch.tensor([len(prefix) for prefix, _ in rows])
        if on_batch is not None:
            on_batch(len(numbers))


def _alike(requests: Sequence[Request], batch: int, *, exactly: bool = False) -> Iterator[list[int]]:
    """The numbers of requests of one length, at most `batch` at a time; targets of one token among themselves.

    exactly: the prefixes have one length as well.
    """
    groups: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for i, (prefix, target) in enumerate(requests):
        own = (len(prefix), len(target)) if exactly else (len(prefix) + len(target), min(len(target), 2))
        groups[own].append(i)
    for _, numbers in sorted(groups.items(), reverse=True):  # the longest first: what is too large fails at once
        for begin in range(0, len(numbers), batch):
            yield numbers[begin : begin + batch]


def fitted(prefix: list[int], target: list[int], length: int, lead: Sequence[int] = ()) -> Request:
    """A request that fits a context of `length` tokens: the lead, the end of the prefix, and all of the target."""
    room = length - len(lead)
    if not target:
        raise ValueError("a target is empty: expected at least one token to score")
    if len(target) > room:
        raise ValueError(f"a target is {len(target)} tokens long: expected at most {room}, the model's context")
    kept = prefix[max(0, len(prefix) + len(target) - room) :]
    return [*lead, *kept], target
