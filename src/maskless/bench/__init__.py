"""Benchmarks: how fast sampling and training are here, beside the computed limit and what others reached."""
