"""Data: sources of text, their preparation into token files, and the reading of those files."""
