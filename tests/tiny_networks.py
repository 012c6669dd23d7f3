"""Networks whose parameters all differ from their start, what their groups see, and how large their tensors are."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def shaken(network: nn.Module, scale: float) -> nn.Module:
    """The network in eval mode, with noise added to every parameter."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += scale * torch.randn_like(parameter)
    return network.eval()


@torch.no_grad()
def check_groups(
    answer: Callable[[Tensor], tuple[Tensor, Tensor]], tokens: Tensor, order: Tensor, sizes: Sequence[int]
) -> None:
    """Every token moves the logits of the other group of its row, and no others.  answer(tokens) -> logits, index"""
    length, (before, index) = tokens.shape[1], answer(tokens)
    row, place = torch.div(index, length, rounding_mode="floor"), index % length
    for b, size in enumerate(sizes):
        groups = torch.empty(length, dtype=torch.long).scatter_(0, order[b], (torch.arange(length) >= size).long())
        for position in range(length):
            changed = tokens.clone()
            changed[b, position] = (tokens[b, position] + 1) % 10
            moved = (answer(changed)[0] != before).any(-1)
            other_group = (row == b) & (groups[place] != groups[position])
            assert not moved[~other_group].any()
            assert moved[other_group].all()


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation gives: its elements, and the bytes that it really takes."""

    elements = 0
    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
                if x.device.type != "meta":
                    self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out
