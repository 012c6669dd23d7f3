"""Logits of single problems from the engine's weights: for samplers that find their order on the way.

Shapes: S problems, N columns of a row, U targets, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from maskless.engine.backbones import Backbone, PartitionBackbone
from maskless.engine.batch_state import BatchState
from maskless.plans import Plan
from maskless.problems import Problems


def answer(backbone: Backbone, problems: Problems, device: torch.device) -> Tensor:
    """What the network answers, up to rounding; nothing is kept for another call.  -> (U, V) float32"""
    S, lead = len(problems), backbone.lead
    context, targets = problems.offsets, problems.target_offsets
    n, end = context.lengths, context.lengths + targets.lengths
    order, tokens = torch.zeros(2, S, int(end.max()), dtype=torch.long, device=n.device)
    order[context.owner, context.within] = problems.positions
    tokens[context.owner, context.within] = problems.tokens
    order[targets.owner, n[targets.owner] + targets.within] = problems.targets
    columns = torch.arange(order.shape[1], device=n.device)
    order = order.gather(1, columns.minimum(end[:, None] - 1))  # shorter rows repeat their last target
    state = BatchState.empty(S, lead + order.shape[1], device)
    state.order[:, lead:], state.tokens[:, lead:] = order.to(device) + backbone.places, tokens.to(device)
    state.known.copy_(n + lead)
    if isinstance(backbone, PartitionBackbone) and lead:
        ids, positions = backbone.first(Plan(order, torch.stack([n, end], 1)))
        state.tokens[:, 0], state.order[:, 0] = ids.to(device), positions.to(device)
    cache = backbone.new_cache(S, lead + order.shape[1], False)
    labels = torch.full((S,), backbone.dropped or 0) if problems.labels is None else problems.labels
    cache.norms.label(labels)
    known = context.grown() if lead else context
    x, _ = cache.forward(state, known.map(lambda y: y.to(device)), targets.map(lambda y: y.to(device)), True)
    return backbone.head.logits(x)
