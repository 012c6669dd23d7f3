"""Sampling: the state grows, some positions in each step, until every wanted position is decided.

The order, the counts per step and the draw are independent choices (order.py, logits.py). Prompts and gaps are just
more context. `sample` follows an order that is fixed beforehand, `sample_confident` decides what it is surest of; both
serve every network that answers problems, with class labels and guidance where it knows them.

Shapes: B rows, L length, K steps, U targets of a step, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from maskless import logits as lg
from maskless.nn import Network, device_of
from maskless.nn.threads import threads_for_draws, threads_for_pass
from maskless.plans import Plan
from maskless.problems import Problems, split

DRAW, NOISE = 2, 3  # purposes of random numbers; those of plans are 0 and 1
Filter = Callable[[Tensor, Tensor, Tensor], Tensor]  # logits (U, V), rows (U,), positions (U,) -> logits


@dataclass(frozen=True)
class Step:
    """What one step decided: U tokens, each with its row and position."""

    number: int  # 0 .. K-1
    rows: Tensor
    positions: Tensor
    tokens: Tensor


def numbered_from(begin: int, on_step: Callable[[Step], None]) -> Callable[[Step], None]:
    """What watches a part of a call whose rows have the numbers `begin` and on."""
    return lambda step: on_step(replace(step, rows=step.rows + begin))


@dataclass(frozen=True, kw_only=True)
class Truncation:
    """Temperature, then top-k, then nucleus; the defaults leave the model's distribution as it is."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature {self.temperature} is out of range: expected 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k {self.top_k} is out of range: expected 1 or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} is out of range: expected more than 0 and at most 1")

    def __call__(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        logits = lg.temper(logits.float(), self.temperature)
        if self.top_k is not None:
            logits = lg.top_k(logits, self.top_k)
        return logits if self.top_p is None or self.top_p == 1 else lg.top_p(logits, self.top_p)


@dataclass(frozen=True)
class Never:
    """Ids that are never drawn: a mask, a BOS. Comes before a truncation, which shares out what is left."""

    ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(i < 0 for i in self.ids):
            raise ValueError(f"ids {self.ids} that are never drawn: expected 0 or more")

    def __call__(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        return lg.rule_out(logits, self.ids)


def warmed(came: Tensor, steps: int) -> Filter:
    """Half the sharpness in the first `steps` steps of a row, so that samples differ before they settle.

    came (B, L): the step of each position, `plan.came()`, on the device of the logits.
    """
    check_warmup(steps)
    first = torch.where(came < 0, came.max(), came).amin(1, keepdim=True)
    warm = came < first + steps

    def filter(logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        return torch.where(warm[rows, positions][:, None], 0.5 * logits, logits)

    return filter


def constant(progress: Tensor) -> Tensor:
    """The whole weight of the guidance in every step."""
    return torch.ones_like(progress)


def ramp(progress: Tensor) -> Tensor:
    """A weight that grows from 0 in the first step, w * s / (S - 1): the first draws stay varied."""
    return progress


SCHEDULES: dict[str, Callable[[Tensor], Tensor]] = {"constant": constant, "ramp": ramp}


@dataclass(frozen=True, kw_only=True)
class Guidance:
    """Classifier-free guidance: logits (1 + w) * conditional - w * unconditional, on raw logits.

    dropped: the label that stands for none, with which the unconditional logits are computed; None where the network
    knows no labels. A weight of 0 is no guidance.
    """

    weight: float
    dropped: int | None
    schedule: Callable[[Tensor], Tensor] = ramp  # of a row's progress: the share of the weight

    def __post_init__(self) -> None:
        if not 0 <= self.weight < math.inf:
            raise ValueError(f"guidance {self.weight} is out of range: expected 0 (none) or more")
        if self.weight and self.dropped is None:
            raise ValueError(f"guidance {self.weight} needs a network with class labels: this one knows none")

    def weights(self, plan: Plan) -> Tensor:
        """The weight of each row in each step.  -> (B, K)"""
        return self.weight * self.schedule(plan.progress())


def guided(network: Network, weight: Tensor, dropped: int) -> Network:
    """A network that answers labelled problems with guided logits; weight (S,) of each problem.

    Both halves go through the network in one call, twice as wide: a step of sampling is narrow, and two calls would
    read all weights twice. Where no problem has a weight, only the conditional half is computed.
    """
    if not bool(weight.any()):
        return network

    def answer(problems: Problems) -> Tensor:
        conditional, unconditional = network(problems.doubled(dropped)).chunk(2)
        owner = problems.target_offsets.owner
        return lg.guide(conditional, unconditional, weight.float().to(owner.device)[owner])

    return answer


def sample(
    network: Network,
    tokens: Tensor,
    plan: Plan,
    keys: Tensor,
    *,
    filter: Filter,
    labels: Tensor | None = None,
    guidance: Guidance | None = None,
) -> Iterator[Step]:
    """Decide tokens (B, L) as planned, in place, yielding each step; labels (B,) of classes.

    This is the method in its plainest form, for any network that answers problems; engine.py does the same faster. A
    step that decides nothing (counts may be 0) yields nothing and costs nothing.
    """
    ask = _asker(network, plan, labels, guidance)
    for number in range(plan.steps):
        starts, ends = plan.ends[:, number], plan.ends[:, number + 1]
        busy = (ends > starts).nonzero()[:, 0]
        if not len(busy):
            continue
        problems, _ = split(tokens[busy], plan.order[busy], starts[busy], ends[busy])
        rows, positions = busy[problems.target_offsets.owner], problems.targets
        drawn = _draw(ask(problems, busy, number), filter, rows, positions, lg.uniforms(keys[rows], positions, DRAW))
        tokens[rows, positions] = drawn
        yield Step(number, rows, positions, drawn)


def sample_confident(
    network: Network,
    tokens: Tensor,
    plan: Plan,
    keys: Tensor,
    *,
    filter: Filter,
    noise: float = 0.0,
    warmup: int = 0,
    labels: Tensor | None = None,
    guidance: Guidance | None = None,
) -> Iterator[Step]:
    """Decide tokens (B, L) in place, in each step those of the drawn tokens that are surest, yielding each step.

    Each step draws a token at every position that is still open, and keeps as many as the plan has in that step: those
    with the largest log p(token) + noise * Gumbel * (1 - progress). p is the network's (guided) probability before the
    filter: after a greedy one all tokens would be equally sure.  MaskGIT, whose released default is a noise of 5

    Of the plan the counts hold; its order decides between equals, and is rewritten in place to what happened.
    warmup: so many first steps of a row draw at half the sharpness.
    """
    if not 0 <= noise < math.inf:
        raise ValueError(f"noise {noise} is out of range: expected 0 (none) or more")
    check_warmup(warmup)
    ask = _asker(network, plan, labels, guidance)
    noises, cold = noise * (1 - plan.progress()), plan.first() + warmup
    for number in range(plan.steps):
        starts, ends, last = plan.ends[:, number], plan.ends[:, number + 1], plan.ends[:, -1]
        busy = (ends > starts).nonzero()[:, 0]
        if not len(busy):
            continue
        problems, _ = split(tokens[busy], plan.order[busy], starts[busy], last[busy])
        owner, within = problems.target_offsets.owner, problems.target_offsets.within
        rows, positions = busy[owner], problems.targets
        logits = ask(problems, busy, number)
        device = torch.device("cpu") if logits.device.type == "mps" else logits.device  # which has float64
        columns = positions.to(device) + (number << 32)  # a step has random numbers of its own
        own, noisy = keys[rows].to(device), noises[rows, number].to(device)
        sharp = torch.where((number < cold)[rows, None].to(logits.device), 0.5 * logits, logits) if warmup else logits
        drawn = _draw(sharp, filter, rows, positions, lg.uniforms(own, columns, DRAW))
        with threads_for_draws(logits):
            sure = lg.log_probability(logits, drawn.to(logits.device)).to(device).double()
        sure += noisy * lg.gumbel(lg.uniforms(own, columns, NOISE))
        surest = problems.target_offsets.ranked(sure).cpu()
        positions, drawn = positions[surest], drawn[surest]
        plan.order[rows, starts[rows] + within] = positions
        kept = within < (ends - starts)[rows]
        rows, positions, drawn = rows[kept], positions[kept], drawn[kept]
        tokens[rows, positions] = drawn
        yield Step(number, rows, positions, drawn)


def check_warmup(steps: int) -> None:
    if steps < 0:
        raise ValueError(f"warmup {steps} is out of range: expected 0 (none) or more steps")


def _asker(
    network: Network, plan: Plan, labels: Tensor | None, guidance: Guidance | None
) -> Callable[[Problems, Tensor, int], Tensor]:
    """What asks the network for the logits of a step: (problems, their rows, step number) -> (U, V)"""
    if labels is not None and labels.shape != plan.ends.shape[:1]:
        raise ValueError(f"labels {tuple(labels.shape)}: expected one for each of {len(plan.ends)} rows")
    device, weights, dropped = device_of(network), None, -1
    if guidance is not None and guidance.weight and guidance.dropped is not None:
        if labels is None:
            raise ValueError(f"guidance {guidance.weight} needs labels, one for each row")
        weights, dropped = guidance.weights(plan), guidance.dropped

    @torch.no_grad()
    def ask(problems: Problems, rows: Tensor, number: int) -> Tensor:
        if labels is not None:
            problems = replace(problems, labels=labels[rows])
        answer = network if weights is None else guided(network, weights[rows, number], dropped)
        problems = problems.to(device)
        with threads_for_pass(network, problems):
            return answer(problems)

    return ask


def _draw(logits: Tensor, filter: Filter, rows: Tensor, positions: Tensor, u: Tensor) -> Tensor:
    device = logits.device
    u = u.float().to(device) if device.type == "mps" else u.to(device)
    with threads_for_draws(logits):
        drawn = lg.draw(filter(logits, rows.to(device), positions.to(device)), u).cpu()
    lg.check_drawn(int(drawn.max()), logits.shape[1])
    return drawn
