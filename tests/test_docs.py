"""What the documents say is so: names exist, recipes exist with the paper's numbers, commands parse, examples run."""

import importlib
import importlib.util
import itertools
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from markdown.extensions.toc import slugify
from typer.main import get_command

import maskless
from maskless.checkpoint import Model
from maskless.cli import app
from maskless.codec.text import byte_codec
from maskless.nn.partition import PartitionConfig, PartitionTransformer
from maskless.recipes import RECIPES

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "maskless"
README, MAP = ROOT / "README.md", ROOT / "docs" / "paper-map.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", *PAGES]
# Pages whose Python needs nothing but runs/my and my.txt.
RUN = [README, *(ROOT / "docs" / name for name in ("quickstart.md", "text.md", "how-it-works.md"))]
COMMANDS: dict[str, Any] = get_command(app).commands
USAGE_ERROR: Any = typer.BadParameter.__base__  # typer has no public name for it


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def blocks(path: Path, language: str) -> Iterator[tuple[int, str]]:
    """The fenced blocks of a language, each with the line on which it starts."""
    text = text_of(path)
    for match in re.finditer(rf"^ *```(?:{language})\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL):
        yield text[: match.start(1)].count("\n"), textwrap.dedent(match[1])


def quoted(path: Path) -> list[str]:
    """What stands in backticks within a line, fenced blocks left out."""
    prose = re.sub(r"^ *```.*?^ *```$", "", text_of(path), flags=re.MULTILINE | re.DOTALL)
    return sorted(set(re.findall(r"`([^`\n]+)`", prose)))


def resolve(name: str) -> object:
    """`maskless.order.mdlm`, `order.mdlm` or `order.py:mdlm` as an object; an AttributeError where there is none."""
    parts = name.replace("/", ".").replace(".py:", ".").removeprefix("maskless.").split(".")
    found: object = importlib.import_module("maskless")
    for depth, part in enumerate(parts, 1):
        module = ".".join(["maskless", *parts[:depth]])
        if importlib.util.find_spec(module) if hasattr(found, "__path__") else None:
            found = importlib.import_module(module)
        else:
            found = getattr(found, part)
    return found


def words_of(line: str) -> list[str]:
    """The words of a shell line, up to a comment, a pipe, a redirection or the next command."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    return list(itertools.takewhile(lambda word: not set(word) <= set("|&;<>"), lexer))


def lines_of(page: Path) -> list[str]:
    """What the shell blocks of a page run, continued lines joined."""
    shell = [block.replace("\\\n", " ") for _, block in blocks(page, "sh|bash|shell|console")]
    lines = [line.strip().removeprefix("$ ") for block in shell for line in block.splitlines()]
    return [shlex.join(words) for line in lines if (words := words_of(line))]


def arguments(line: str) -> list[str]:
    """The words after `maskless` or `-m maskless`, up to a pipe, a redirection or the next command."""
    words = words_of(line)
    begins = words[:1] == ["maskless"] or ("-m", "maskless") in itertools.pairwise(words)
    after = words[words.index("maskless") + 1 :] if begins else []
    return after[1:] if after[:1] == ["--"] else after  # which keeps a launcher from the options that follow


def parse(words: list[str]) -> None:
    """Fail for a command, an option or a value that the command line would refuse."""
    name, *rest = words
    assert name in COMMANDS, f"unknown command {name!r}: expected one of {', '.join(COMMANDS)}"
    try:
        COMMANDS[name].make_context(name, rest)
    except typer.Exit:
        assert "--help" in rest
    except USAGE_ERROR as error:
        pytest.fail(f"maskless {shlex.join(words)}: {error.format_message()}")


def options(command: str) -> set[str]:
    return {"--help"}.union(*(parameter.opts + parameter.secondary_opts for parameter in COMMANDS[command].params))


DOTTED = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+|[\w/]+\.py:\w+"
PROSE = {name for path in (MAP, ROOT / "CONTRIBUTING.md") for name in quoted(path)}
NAMES = sorted(
    name for name in PROSE if re.fullmatch(DOTTED, name) and not (ROOT / name).exists() and not (SOURCE / name).exists()
)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_in_the_documents_exists(name):
    resolve(name)


def test_a_right_name_resolves_and_a_wrong_one_is_noticed():
    assert len(NAMES) > 40
    for name in ("maskless.load", "order.mdlm", "nn.blocks.SelfBlock", "nn/blocks.py:open_gates"):
        assert callable(resolve(name))
    for name in ("order.nothing", "nothing.order", "maskless.order.mdlm.more", "order.py:nothing"):
        with pytest.raises(AttributeError):
            resolve(name)


def test_every_recipe_on_the_map_exists():
    sets = "|".join(sorted({name.split("-")[0] for name in RECIPES}))
    named = [name for name in quoted(MAP) if re.fullmatch(rf"(?:{sets}|lm1b|owt)-[\w-]+", name)]
    assert named
    assert set(named) - RECIPES.keys() == set()


def test_the_map_has_every_row_of_the_paper_with_its_perplexity():
    rows = {name: float(number) for number, name in re.findall(r"\| (\d+\.\d+) `([\w-]+)`", text_of(MAP))}
    paper = [recipe for recipe in RECIPES.values() if recipe.source.startswith("PGM, Tab. 5")]
    assert rows == {recipe.name: recipe.goals[0].value for recipe in paper}


def test_every_option_on_the_map_exists():
    alone = {name.split()[0] for name in quoted(MAP) if name.startswith("--")}
    assert alone <= set.union(*map(options, COMMANDS))


@pytest.mark.parametrize("name", RECIPES)
def test_the_commands_of_a_recipe_parse(name):
    for line in RECIPES[name].commands:
        parse(arguments(line))


@pytest.mark.parametrize("words", ["nosuch", "generate m --nosuch 3", "generate m --steps many", "generate"])
def test_a_wrong_command_is_noticed(words):
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        parse(arguments(f"torchrun --nproc-per-node 8 -m maskless {words}"))


def test_commands_are_read_out_of_shell_lines():
    assert arguments("maskless generate runs/my --n 2 > out.txt  # two") == ["generate", "runs/my", "--n", "2"]
    assert arguments('maskless fill runs/my "a [8] > b" | head') == ["fill", "runs/my", "a [8] > b"]
    assert arguments("torchrun -m maskless train --out runs/my") == ["train", "--out", "runs/my"]
    assert arguments("pip install maskless") == []


@pytest.fixture
def with_a_run(tmp_path, monkeypatch):
    """A working directory where runs/my is the folder of a run: a random, tiny PGM over bytes, 64 tokens long."""
    torch.manual_seed(0)
    sizes = {"width": 32, "heads": 2, "encoder": 1, "decoder": 1, "condition": 8}
    network = PartitionTransformer(PartitionConfig(vocab=byte_codec().vocab, length=64, **sizes))
    Model(network, byte_codec()).save_pretrained(tmp_path / "runs" / "my" / "model")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("page", RUN, ids=[page.name for page in RUN])
def test_the_python_in_the_pages_runs(with_a_run, page):
    """All blocks in order, in one namespace, as a reader would type them, but for numbers that take long."""
    Path("my.txt").write_text("The cat sat on the mat, and the dog lay in the sun all day long.\n" * 200)
    namespace: dict[str, Any] = {"__name__": "page"}
    found = list(blocks(page, "python|py"))
    assert found
    for line, block in found:
        small = block.replace('"steps": 200', '"steps": 2').replace("revise=16", "revise=2")
        exec(compile("\n" * line + small, str(page), "exec"), namespace)


def links(text: str) -> list[str]:
    """Where the links and pictures of a document lead, those to other servers and in fenced blocks left out."""
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose))
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def anchors(text: str) -> set[str]:
    """The names of a document's headings, as links call them."""
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return {slugify(heading.replace("`", ""), "-") for heading in re.findall(r"^#+ (.+)$", prose, re.MULTILINE)}


def broken(path: Path, link: str) -> bool:
    """Whether a link of a document leads nowhere."""
    name, _, anchor = link.partition("#")
    target = path.parent / name if name else path
    return not target.exists() or bool(anchor and anchor not in anchors(text_of(target)))


@pytest.mark.parametrize("path", DOCUMENTS, ids=[path.name for path in DOCUMENTS])
def test_links_inside_the_documents_lead_somewhere(path):
    assert [link for link in links(text_of(path)) if broken(path, link)] == []


def test_a_broken_link_is_noticed():
    text = "# One: two `three`\n[a](b.md) ![c](img/d.png#e) `[f](g)` [h](https://i) [j](#k)\n```sh\n[l](m)\n# n\n```\n"
    assert links(text) == ["b.md", "img/d.png#e", "#k"]
    assert anchors(text) == {"one-two-three"}
    page = ROOT / "docs" / "speed.md"
    assert not broken(page, "results.md#how-fast")
    assert not broken(page, "#training")
    assert broken(page, "nothing.md")
    assert broken(page, "results.md#nothing")
    assert broken(page, "#nothing")


def test_the_quickstart_lists_the_examples_and_runs_only_those():
    page = ROOT / "docs" / "quickstart.md"
    there = {path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".ipynb")}
    assert there == {name for name in quoted(page) if re.fullmatch(r"\w+\.(?:py|ipynb)", name)}
    assert set(re.findall(r"^python examples/(\S+)", text_of(page), re.MULTILINE)) <= there


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The documentation as a site; a warning of mkdocs is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, stderr=subprocess.PIPE)
    assert built.returncode == 0, built.stderr.decode()
    return folder


def test_the_site_needs_no_other_server(site):
    pages = list(site.glob("*.html"))
    assert len(pages) > len(PAGES)  # and one for what is not found
    for page in pages:
        loaded = re.findall(r"<(?:script|img|source|iframe)[^>]* src=\"?([^\s\">]+)", page.read_text())
        loaded += re.findall(r"<link[^>]* rel=\"?(?:stylesheet|icon|preconnect)[^>]*>", page.read_text())
        assert [one for one in loaded if "//" in one] == [], page.name


def test_every_page_is_in_the_navigation_of_the_site(site):
    start = (site / "index.html").read_text()
    assert [page.stem for page in PAGES if f'href="{page.stem}.html"' not in start] == []


def test_the_reference_has_every_public_name_with_its_fields(site):
    shown = (site / "reference.html").read_text()
    for name in set(maskless.__all__) - {"__version__"}:
        assert f"maskless.{name}" in shown
    assert "always the most likely token" in shown  # a comment behind a field of How
    assert "<math" in (site / "paper-map.html").read_text()
    assert "$" not in re.sub(r"<code>.*?</code>", "", (site / "how-it-works.html").read_text(), flags=re.DOTALL)
