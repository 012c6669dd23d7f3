"""Several tokens a round, exactly: tokens that were drawn together are checked as a chain.

A draft of k tokens is drawn from the marginals p, all given the same known tokens. One more pass gives q, each given
the drafted ones before it as well. Going along the order a token is accepted with probability min(1, q/p); at the first
refusal one is drawn from what q has and p lacks, and the rest is dropped. So the result has exactly the distribution of
one token a step, and the first of a draft is always accepted.  Leviathan et al. 2023, along any order

Shapes: S rows of a round, U drafted tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from maskless import logits as lg
from maskless.drafts import Ask, Tally
from maskless.problems import Offsets, Problems, chain

ACCEPT, RESIDUAL = 6, 7  # purposes of random numbers; those of draws, plans and revision are 0 to 5


def checking(ask: Ask, drawn: Tensor) -> Problems:
    """The chains that tell how likely each drafted token is after those before it; drawn (U,)."""
    drafts, rows, owner = ask.drafts, ask.rows, ask.offsets.owner
    tokens = drafts.tokens[rows]
    tokens[owner, ask.positions] = drawn
    problems, _ = chain(tokens, drafts.plan.order[rows], ask.starts, ask.ends)
    return problems if drafts.labels is None else replace(problems, labels=drafts.labels[rows])


def accept(
    drawn: Tensor, p: Tensor, q: Tensor, offsets: Offsets, keys: Tensor, columns: Tensor
) -> tuple[Tensor, Tensor, Tally]:
    """What becomes of drafted tokens (U,): which ones stand in the end, and how many of each row do.  -> (U,), (S,)

    p, q (U, V): logits, filtered alike, from which they were drawn and by which they are checked; keys, columns (U,) of
    random numbers.
    """
    wide = torch.float32 if p.device.type == "mps" else torch.float64
    p, q = (x.to(wide).softmax(-1) for x in (p, q))
    at = drawn.to(p.device)[:, None]
    ratio = (q.gather(1, at) / p.gather(1, at))[:, 0].cpu().double()
    taken = (lg.uniforms(keys, columns, ACCEPT) < ratio) | (offsets.within == 0)
    refused = torch.where(taken, offsets.within + len(taken), offsets.within)
    S = len(offsets)
    first = torch.full((S,), len(taken)).scatter_reduce(0, offsets.owner, refused, "amin")  # of each row
    lengths = offsets.bounds.diff().long()
    accepted = first.minimum(lengths)
    here = (offsets.within == accepted[offsets.owner]).nonzero()[:, 0]  # where a row has its first refusal
    tokens = drawn.clone()
    if len(here):
        lacking = (q[here.to(q.device)] - p[here.to(p.device)]).clamp_min(0)
        lacking = torch.where(lacking.sum(1, keepdim=True) > 0, lacking, q[here.to(q.device)])  # equal but for rounding
        u = lg.uniforms(keys[here], columns[here], RESIDUAL).to(lacking.device)
        tokens[here] = lg.draw(lacking.log(), u).cpu()
    decided = (accepted + 1).minimum(lengths)
    nats = float(-ratio.log()[offsets.within > 0].sum())  # infinite where the chain rules out what was drawn
    return tokens, decided, Tally(S, len(drawn), int(accepted.sum()), int(decided.sum()), nats)
