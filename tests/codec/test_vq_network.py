"""The network of the image codec is its description, and gives the released code's tokens and pixels."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from vq_made import make, noise

from maskless.codec.vq import VQ, VQConfig

PARITY = Path(__file__).resolve().parents[3] / "shared" / "parity" / "vq" / "vq.safetensors"


class Reference:
    """An independent one: the network as functions of the released names, written from their description."""

    def __init__(self, state: dict[str, Tensor]):
        self.state = state

    def count(self, prefix: str) -> int:
        return len({name[len(prefix) :].split(".")[0] for name in self.state if name.startswith(prefix)})

    def conv(self, name: str, x: Tensor, **how) -> Tensor:
        weight = self.state[f"{name}.weight"]
        how = {"padding": weight.shape[-1] // 2} | how
        return F.conv2d(x, weight, self.state[f"{name}.bias"], **how)

    def norm(self, name: str, x: Tensor) -> Tensor:
        groups = x.unflatten(1, (32, -1))
        mean = groups.mean((2, 3, 4), keepdim=True)
        variance = (groups - mean).square().mean((2, 3, 4), keepdim=True)
        y = ((groups - mean) / (variance + 1e-6).sqrt()).flatten(1, 2)
        return y * self.state[f"{name}.weight"][:, None, None] + self.state[f"{name}.bias"][:, None, None]

    def swish(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)

    def res(self, name: str, x: Tensor) -> Tensor:
        y = self.conv(f"{name}.conv1", self.swish(self.norm(f"{name}.norm1", x)))
        y = self.conv(f"{name}.conv2", self.swish(self.norm(f"{name}.norm2", y)))
        return y + (self.conv(f"{name}.nin_shortcut", x) if f"{name}.nin_shortcut.weight" in self.state else x)

    def attention(self, name: str, x: Tensor) -> Tensor:
        y = self.norm(f"{name}.norm", x)
        q, k, v = (self.conv(f"{name}.{part}", y) for part in "qkv")
        scores = torch.einsum("bchw,bcij->bhwij", q, k) / q.shape[1] ** 0.5
        p = scores.flatten(3).softmax(-1).view_as(scores)
        return x + self.conv(f"{name}.proj_out", torch.einsum("bhwij,bcij->bchw", p, v))

    def middle(self, name: str, x: Tensor) -> Tensor:
        return self.res(f"{name}.mid.2", self.attention(f"{name}.mid.1", self.res(f"{name}.mid.0", x)))

    def levels(self, name: str, x: Tensor) -> Tensor:
        for i in range(self.count(f"{name}.conv_blocks.")):
            level = f"{name}.conv_blocks.{i}"
            for j in range(self.count(f"{level}.res.")):
                x = self.res(f"{level}.res.{j}", x)
                if f"{level}.attn.{j}.q.weight" in self.state:
                    x = self.attention(f"{level}.attn.{j}", x)
            if f"{level}.downsample.conv.weight" in self.state:
                x = self.conv(f"{level}.downsample.conv", F.pad(x, (0, 1, 0, 1)), stride=2, padding=0)
            if f"{level}.upsample.conv.weight" in self.state:
                x = self.conv(f"{level}.upsample.conv", x.repeat_interleave(2, 2).repeat_interleave(2, 3))
        return x

    def latents(self, images: Tensor) -> Tensor:
        x = self.middle("encoder", self.levels("encoder", self.conv("encoder.conv_in", images)))
        return self.conv("quant_conv", self.conv("encoder.conv_out", self.swish(self.norm("encoder.norm_out", x))))

    def unit(self, x: Tensor, dim: int) -> Tensor:
        return x / x.square().sum(dim, keepdim=True).sqrt()

    def indices(self, latents: Tensor) -> Tensor:
        codes = self.unit(self.state["quantize.embedding.weight"], 1)
        return (self.unit(latents, 1)[:, None] - codes[None, :, :, None, None]).square().sum(2).argmin(1)

    def images(self, indices: Tensor) -> Tensor:
        vectors = self.unit(self.state["quantize.embedding.weight"], 1)[indices].permute(0, 3, 1, 2)
        x = self.middle("decoder", self.conv("decoder.conv_in", self.conv("post_quant_conv", vectors)))
        return self.conv("decoder.conv_out", self.swish(self.norm("decoder.norm_out", self.levels("decoder", x))))


@pytest.mark.parametrize("factor", [2, 4, 8])
@torch.no_grad()
def test_the_network_is_its_description(factor):
    codec, images = make(factor, blocks=2), noise(2, 3, 16, 32)
    reference = Reference(codec.state_dict())
    torch.testing.assert_close(codec.latents(images), reference.latents(images), rtol=0, atol=1e-4)
    indices = codec.encode(images)
    assert indices.equal(reference.indices(codec.latents(images)))
    assert len(indices.unique()) > 3
    torch.testing.assert_close(codec.decode(indices), reference.images(indices), rtol=0, atol=1e-4)


@pytest.mark.skipif(not PARITY.exists(), reason="the fixtures of the released code are not here")
@torch.no_grad()
def test_tokens_and_pixels_of_the_released_code():
    known = load_file(PARITY)
    codec = VQ(VQConfig(codes=64, code_width=8, latent=16, width=32, multipliers=(1, 2)))
    names = [name for name in known if name.startswith("state.") and not name.endswith("codebook_used")]
    codec.load_state_dict({name.removeprefix("state."): known[name].float() for name in names})
    torch.testing.assert_close(codec.latents(known["image"]), known["pre_quant"], rtol=0, atol=1e-4)
    assert codec.encode(known["image"]).equal(known["indices"])
    torch.testing.assert_close(codec.decode(known["indices"]), known["decoded"], rtol=0, atol=1e-4)
    out, quantised = codec(known["image"])
    torch.testing.assert_close(quantised.vectors, known["quant"], rtol=0, atol=1e-5)
    torch.testing.assert_close(out, known["decoded"], rtol=0, atol=1e-4)
