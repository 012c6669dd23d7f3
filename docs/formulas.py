"""Turns the formulas of a page into MathML, which browsers draw themselves: no script, no fonts from elsewhere."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **kwargs: Any) -> str:
    """Called by mkdocs with the HTML of a page, in which pymdownx.arithmatex has marked the formulas."""
    return FORMULA.sub(as_mathml, content)


def as_mathml(found: re.Match[str]) -> str:
    kind, latex = found.groups()
    return str(convert(html.unescape(latex).strip(), display="block" if kind == "div" else "inline"))
