"""The tables behind test_commands.py: all rows are needed, and every line is read as a shell would read it."""

import re
import tomllib

from command_inputs import INPUTS
from test_commands import LINES, MADE_BY, NOT_RUN, PAGES, RUN, TOY, launched, read_by, row_for, small
from test_docs import COMMANDS, ROOT, options, quoted, words_of


def test_every_row_of_the_tables_is_needed():
    assert [start for start in NOT_RUN if not any(line.startswith(start) for line in LINES)] == []
    assert {*TOY} - {row_for(launched(line)) for line in RUN} == set()
    run = [line for line in (*RUN, *MADE_BY.values()) if not line.startswith("curl ")]
    assert {*INPUTS, *MADE_BY} - set().union(*(read_by(small(line)) for line in run)) == set()


def test_what_is_not_run_exists():
    """Targets of make, and extras of the package."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for words in (words_of(line) for line in LINES):
        if words[0] == "make":
            assert words[1] in targets
        if words[:2] == ["pip", "install"]:
            assert set(re.findall(r"\[(.+)\]", words[-1])) <= {*extras}


def test_commands_within_sentences_have_the_options_that_they_name():
    spans = [span.split() for page in PAGES for span in quoted(page) if span.startswith("maskless ")]
    assert len(spans) > 10
    for _, command, *rest in spans:
        assert command in COMMANDS
        if command != "bench":  # whose commands have the options
            assert {word for word in rest if word.startswith("--")} <= options(command), (command, rest)
