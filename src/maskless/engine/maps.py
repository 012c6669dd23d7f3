"""The maps that layers are made of, in the precision of the stream, or with the operands of their products in float8.

In float8 (e4m3) a weight has one scale for each row that comes out, a token one of its own, which is found where the
token is made: in the norm, or in the activation inside the MLP. Such a product cannot add to the stream, so the norm
that follows does. Attention, its output, the head and the stream itself stay in bfloat16. On a CPU the products of the
same float8 numbers are computed in float32, to try what they cost in quality; faster they are on a GPU only.

Shapes: T tokens, D width, H width inside the MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from maskless.engine import kernels
from maskless.engine.kernels import Scaled
from maskless.engine.stream import Linear, Stream

Read = Callable[[Stream], Tensor]  # a linear map of what the next norm gives
Branch = Callable[[Stream], None]  # from the next norm through an MLP, back to the stream
CAPABLE = (8, 9)  # the first GPUs with float8
GRAIN = 16  # of the sizes that their products take


class Maps(Protocol):
    """How weights become maps."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the stream, and of all that is no map of these."""
        ...

    def read(self, linear: Linear) -> Read: ...

    def gelu(self, up: Linear, down: Linear) -> Branch: ...

    def swiglu(self, up: Linear, down: Linear) -> Branch: ...


class StreamMaps:
    """Maps in the precision of the stream."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def read(self, linear: Linear) -> Read:
        weight, bias = cast(linear, self.dtype)
        return lambda stream: F.linear(stream.read(), weight, bias)

    def gelu(self, up: Linear, down: Linear) -> Branch:
        (weight, bias), out = cast(up, self.dtype), cast(down, self.dtype)
        assert bias is not None
        return lambda stream: stream.add(kernels.gelu_linear(stream.read(), weight, bias), out)

    def swiglu(self, up: Linear, down: Linear) -> Branch:
        into, out = cast(up, self.dtype), cast(down, self.dtype)
        return lambda stream: stream.add(kernels.swiglu(F.linear(stream.read(), *into)), out)


class Float8:
    """Maps whose products have operands in float8."""

    dtype = torch.bfloat16

    def read(self, linear: Linear) -> Read:
        weight, bias = _scaled(linear)
        return lambda stream: kernels.scaled_linear(stream.read_scaled(), weight, bias)

    def gelu(self, up: Linear, down: Linear) -> Branch:
        (weight, bias), out = _scaled(up), _scaled(down)
        assert bias is not None

        def branch(stream: Stream) -> None:
            inside = kernels.scaled_linear(stream.read_scaled(), weight, None)  # (T, H); its bias comes with the GELU
            stream.join(kernels.scaled_linear(kernels.gelu_scaled(inside, bias), *out))

        return branch

    def swiglu(self, up: Linear, down: Linear) -> Branch:
        into, out = _scaled(up), _scaled(down)

        def branch(stream: Stream) -> None:
            inside = kernels.scaled_linear(stream.read_scaled(), *into)  # (T, 2H)
            stream.join(kernels.scaled_linear(kernels.swiglu_scaled(inside), *out))

        return branch


def maps_in(precision: torch.dtype, device: torch.device) -> Maps:
    """Maps in a precision; float8_e4m3fn: products in float8, all else in bfloat16."""
    if precision != kernels.FLOAT8:
        return StreamMaps(precision)
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"precision float8 on {device.type}: expected cuda, or cpu to try it")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABLE:
        has, wanted = (".".join(map(str, c)) for c in (torch.cuda.get_device_capability(device), CAPABLE))
        raise ValueError(f"precision float8 on a GPU of compute capability {has}: expected {wanted} or more")
    return Float8()


def cast(linear: Linear, dtype: torch.dtype) -> Linear:
    weight, bias = linear
    return weight.to(dtype), None if bias is None else bias.to(dtype)


def _scaled(linear: Linear) -> tuple[Scaled, Tensor | None]:
    weight, bias = linear
    if any(size % GRAIN for size in weight.shape):
        sizes = " x ".join(map(str, weight.shape))
        raise ValueError(f"precision float8 with a matrix of {sizes}: expected multiples of {GRAIN}")
    return kernels.scaled(weight), None if bias is None else bias.to(Float8.dtype)
