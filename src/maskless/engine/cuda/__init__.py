"""Triton kernels of the engine; loaded only where Triton is, which comes with torch's builds for CUDA."""

from maskless.engine.cuda.attention import attend, rotate_, store, store_and_attend
from maskless.engine.cuda.batch import places
from maskless.engine.cuda.digest import digest
from maskless.engine.cuda.draw import LONGEST, draw_chunks, draw_rows
from maskless.engine.cuda.linear import add_linear, norm_linear
from maskless.engine.cuda.norms import modulate, normalise, rms_, swiglu
from maskless.engine.cuda.rounds import Drafting, accept, draft

__all__ = [
    "LONGEST", "Drafting", "accept", "add_linear", "attend", "digest", "draft", "draw_chunks", "draw_rows", "modulate",
    "norm_linear", "normalise", "places", "rms_", "rotate_", "store", "store_and_attend", "swiglu",
]  # fmt: skip
