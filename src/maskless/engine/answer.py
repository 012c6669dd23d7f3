"""Logits of single problems from the engine's weights: for samplers that find their order on the way.

Shapes: S problems, N slots of a row, U targets, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from maskless.engine import kernels
from maskless.engine.board import Board
from maskless.engine.bodies import Body, PartitionBody
from maskless.plans import Plan
from maskless.problems import Problems


def answer(body: Body, problems: Problems, device: torch.device) -> Tensor:
    """What the network answers, up to rounding; nothing is kept for another call.  -> (U, V) float32"""
    S, lead = len(problems), body.lead
    context, targets = problems.offsets, problems.target_offsets
    n, end = context.lengths, context.lengths + targets.lengths
    order, tokens = torch.zeros(2, S, int(end.max()), dtype=torch.long, device=n.device)
    order[context.owner, context.within] = problems.positions
    tokens[context.owner, context.within] = problems.tokens
    order[targets.owner, n[targets.owner] + targets.within] = problems.targets
    columns = torch.arange(order.shape[1], device=n.device)
    order = order.gather(1, columns.minimum(end[:, None] - 1))  # shorter rows repeat their last target
    board = Board.empty(S, lead + order.shape[1], device)
    board.order[:, lead:], board.tokens[:, lead:] = order.to(device) + body.places, tokens.to(device)
    board.at.copy_(n + lead)
    if isinstance(body, PartitionBody) and lead:
        ids, positions = body.first(Plan(order, torch.stack([n, end], 1)))
        board.tokens[:, 0], board.order[:, 0] = ids.to(device), positions.to(device)
    memory = body.open(S, lead + order.shape[1], False)
    labels = torch.full((S,), body.dropped or 0) if problems.labels is None else problems.labels
    memory.norms.label(labels)
    known = context.grown() if lead else context
    x, _ = memory(board, known.map(lambda y: y.to(device)), targets.map(lambda y: y.to(device)), True)
    head = body.head
    return (kernels.logits_of(x, head.weight) + head.bias)[:, : head.vocab]
