"""Training: the loop, the run folder around it, and sensible sizes for a text nobody configured anything for."""
