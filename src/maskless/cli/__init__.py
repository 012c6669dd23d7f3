"""The command line: prepare, train, generate, fill, evaluate, fid, convert, bench, demo."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from maskless.cli.entry import main

if TYPE_CHECKING:
    from maskless.cli.commands import app

__all__ = ["app", "main"]


def __getattr__(name: str) -> Any:
    """The commands, imported when first used: `main` does it where Ctrl-C is heard."""
    if name != "app":
        raise AttributeError(f"module 'maskless.cli' has no attribute {name!r}")
    from maskless.cli import commands

    return commands.app
