"""Codecs: what turns text or images into tokens and back."""
