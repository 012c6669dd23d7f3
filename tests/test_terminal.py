"""What steers a terminal is shown there, and left as it is in files and pipes."""

import io
import sys

import pytest
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from maskless.terminal import Screen, plain, say

CONTROL = [chr(code) for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"]
TRAP = "a\x1b]0;title\x07 \x1b[31mred\x1b[0m \x9b2J \x08\r\x7f [bold]b"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_plain_text_has_a_sign_for_each_control_character():
    assert len(CONTROL) == 63
    shown = plain("".join(CONTROL))
    assert len(shown) == len(CONTROL)
    assert not set(shown) & set(CONTROL)
    assert plain("\x1b[31m\x7f\x9b") == "␛[31m␡\ufffd"
    for text in ("two\nlines\tand a tab", "naïve 漢字 🙂 العربية", shown):
        assert plain(text) == text


@pytest.mark.parametrize(("stream", "expected"), [(Terminal, plain(TRAP)), (io.StringIO, TRAP)])
def test_a_pipe_keeps_a_text_as_it_is(monkeypatch, stream, expected):
    monkeypatch.setattr(sys, "stdout", stream())
    say(TRAP)
    assert sys.stdout.getvalue() == f"{expected}\n"


def table() -> Table:
    made = Table("class", TRAP)
    made.add_row(Text(TRAP), Text("1"))
    return made


@pytest.mark.parametrize("shown", [lambda: TRAP, lambda: Panel(Text(TRAP), title=Text(TRAP)), table])
def test_a_screen_shows_its_own_colours_and_no_command_of_a_text(shown):
    screen, pipe = (Screen(force_terminal=force, color_system=None, file=io.StringIO()) for force in (True, False))
    for console in (screen, pipe):
        console.print(shown(), markup=False)
    assert not set(screen.file.getvalue()) & set(CONTROL)
    assert "␛[31mred␛[0m" in screen.file.getvalue()
    assert "\x1b[31mred\x1b[0m" in pipe.file.getvalue()
    colours = Screen(force_terminal=True, color_system="standard", file=io.StringIO())
    colours.print(Text(TRAP, style="red"))
    assert colours.file.getvalue().startswith("\x1b[31ma␛]0;title")
