"""Evaluation: what a model is worth, with a standard error."""
