"""The Triton kernels of training; loaded only where Triton is, which comes with torch's builds for CUDA."""

from maskless.nn.cuda.attention import attend_segments
from maskless.nn.cuda.sums import costs, gelu_gradient, sum_segments

__all__ = ["attend_segments", "costs", "gelu_gradient", "sum_segments"]
