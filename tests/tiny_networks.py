"""Networks whose parameters all differ from their start, and how large the tensors are that a computation makes."""

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
