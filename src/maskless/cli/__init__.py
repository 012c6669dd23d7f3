"""The command line: prepare, train, generate, fill, evaluate, fid, convert, bench, demo."""

from maskless.cli.commands import app
from maskless.cli.entry import main

__all__ = ["app", "main"]
