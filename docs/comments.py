"""Lists the fields of a dataclass in the reference, each with the comment that stands behind it in the source."""

from __future__ import annotations

import io
import tokenize
from typing import Any

import griffe


class Comments(griffe.Extension):
    """Adds a list of those fields that have a comment to the docstring of their class."""

    def on_class_members(self, *, node: Any, cls: griffe.Class, **kwargs: Any) -> None:
        if cls.docstring is None or "dataclass" not in cls.labels:
            return
        found = [(name, comment_of(field)) for name, field in cls.members.items() if field.is_attribute]
        lines = [f"- `{name}`: {comment}" for name, comment in found if comment]
        cls.docstring.value = "\n\n".join([cls.docstring.value, *(["\n".join(lines)] if lines else [])])


def comment_of(field: griffe.Object | griffe.Alias) -> str:
    """The comment at the end of a field's last line, empty without one."""
    line = field.source.splitlines()[-1].strip()
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(line + "\n").readline))
    except (tokenize.TokenError, SyntaxError):
        return ""
    return next((token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT), "")
