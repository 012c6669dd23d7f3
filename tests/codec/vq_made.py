"""Small image codecs whose every parameter differs from its start, and noise for them to encode."""

import torch
from torch import Tensor

from maskless.codec.vq import VQ, VQConfig
from tiny_networks import shaken

TINY = {"codes": 20, "code_width": 4, "latent": 8, "width": 32, "blocks": 1}
FACTORS = {2: (1, 1), 4: (1, 1, 2), 8: (1, 1, 1, 2)}


def make(factor: int = 2, seed: int = 0, **sizes) -> VQ:
    """A codec whose every parameter differs from its start."""
    torch.manual_seed(seed)
    return shaken(VQ(VQConfig(multipliers=FACTORS[factor], **TINY | sizes)), 0.1)


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
