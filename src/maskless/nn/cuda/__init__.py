"""The Triton kernels of training; loaded only where Triton is, which comes with torch's builds for CUDA."""

from maskless.nn.cuda.attention import attend, attend_rotated
from maskless.nn.cuda.sums import costs, sum_segments

__all__ = ["attend", "attend_rotated", "costs", "sum_segments"]
