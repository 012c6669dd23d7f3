"""The house rules as tests: imports only go down, rooms on one floor do not know each other, and files stay small."""

import ast
import functools
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "maskless"
LONGEST_FILE = 350

# A room is a module, or a package with all that is in it. A room may use the floors below it, and on its own floor the
# rooms that are named before it.
FLOORS: list[list[str]] = [
    ["version", "schedule", "seeds", "how", "problems", "order", "logits", "gpus"],  # arithmetic
    ["nn", "mixture", "plans", "flops"],  # networks, and which orders they are asked in
    ["objective", "revision", "draw", "drafts", "speculation", "sampling"],  # the method
    ["engine"],  # the fast path
    [  # the outside world
        *("files", "shipped", "terminal", "weights", "codec", "frame", "checkpoint", "ema", "data", "official"),
    ],
    ["decide", "texts", "scores", "images", "pictures", "api"],  # what a user calls
    ["evaluate", "train", "shards", "paper", "bench", "recipes", "budget", "reproduce"],  # procedures
    ["serve", "demo", "train_demo", "cli", "__main__"],  # doors
]
FLOOR = {room: (floor, place) for floor, rooms in enumerate(FLOORS) for place, room in enumerate(rooms)}
FRONT = "__init__"  # what `import maskless` gives; as high as the highest room that it shows

MODULES = sorted(SOURCE.rglob("*.py"))
NAMES = [str(path.relative_to(SOURCE)) for path in MODULES]
each_module = pytest.mark.parametrize("path", MODULES, ids=NAMES)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def absolute(node: ast.Import | ast.ImportFrom, path: Path) -> list[str]:
    """What a statement imports, by full names: `from . import state` in train/run.py -> maskless.train.state"""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    package = ("maskless", *path.relative_to(SOURCE).parent.parts)
    above = package[: len(package) - node.level + 1] if node.level else ()
    base = ".".join([*above, *([node.module] if node.module else [])])
    return [f"{base}.{alias.name}" for alias in node.names]


def statements(tree: ast.AST, *, inside_functions: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements, also under `if TYPE_CHECKING`, in `try` and in classes; in functions if asked for."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif inside_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from statements(node, inside_functions=inside_functions)


def imports(path: Path, *, inside_functions: bool = True) -> list[str]:
    found = statements(tree_of(path), inside_functions=inside_functions)
    return [name for node in found for name in absolute(node, path)]


def room_named(name: str) -> str:
    """maskless.train.loop.train -> train; what is not a module comes from the front."""
    parts = name.split(".")
    is_room = len(parts) > 1 and ((SOURCE / parts[1]).is_dir() or (SOURCE / f"{parts[1]}.py").is_file())
    return parts[1] if is_room or (len(parts) > 1 and parts[1] in FLOOR) else FRONT


def rooms_used(path: Path) -> set[str]:
    return {room_named(name) for name in imports(path) if name.split(".")[0] == "maskless"} - {room_of(path)}


def third_party(names: list[str]) -> set[str]:
    return {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - {"maskless"}


def importable(requirements: list[str]) -> set[str]:
    """The names under which requirements are imported: "pillow>=10" -> PIL"""
    projects = {re.split(r"[\s<>=!~;\[]", line)[0].replace("-", "_") for line in requirements}
    return {{"pillow": "PIL"}.get(project, project) for project in projects}


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CORE = importable(PROJECT["dependencies"])
EXTRAS = importable([line for lines in PROJECT["optional-dependencies"].values() for line in lines])
WEB = importable(PROJECT["optional-dependencies"]["web"])  # what the room `serve` is built from; only commands enter it
BUNDLED = {"triton"}  # comes with torch's builds for CUDA; for modules and packages named cuda alone


def test_every_module_is_on_the_plan_and_every_room_is_built():
    built = {room_of(path) for path in MODULES} - {FRONT}
    assert built - FLOOR.keys() == set(), "rooms that are not on the plan"
    assert FLOOR.keys() - built == set(), "rooms on the plan that do not exist"


@each_module
def test_imports_only_go_down(path):
    here = room_of(path)
    if here == FRONT:
        return  # it may show whatever it likes
    front = max(FLOOR[room] for room in rooms_used(SOURCE / "__init__.py"))
    floors = FLOOR | {FRONT: front}
    allowed = {room for room in floors if floors[room] < FLOOR[here]}
    assert rooms_used(path) - allowed == set(), f"{here} is on floor {FLOOR[here][0]}"


@pytest.mark.parametrize("room", sorted(FLOORS[0]))
def test_the_ground_floor_needs_torch_and_the_standard_library_only(room):
    path = SOURCE / f"{room}.py"
    assert third_party(imports(path)) <= {"torch"}
    assert rooms_used(path) <= set(FLOORS[0])


@each_module
def test_modules_load_with_the_core_dependencies_alone(path):
    needed = third_party(imports(path, inside_functions=False)) - CORE - (WEB if room_of(path) == "serve" else set())
    assert needed - (BUNDLED if holds_kernels(path) else set()) == set()


def holds_kernels(path: Path) -> bool:
    return "cuda" in (path.stem, path.parent.name)


@each_module
def test_kernels_are_loaded_only_where_they_run(path):
    if holds_kernels(path):
        return
    assert [name for name in imports(path, inside_functions=False) if re.match(r"maskless\..*\bcuda\b", name)] == []


@each_module
def test_everything_imported_is_declared(path):
    assert third_party(imports(path)) - CORE - EXTRAS - BUNDLED == set()


@each_module
def test_files_stay_small_have_a_name_of_their_own_and_put_nothing_off(path):
    assert len(path.read_text().splitlines()) <= LONGEST_FILE
    assert path.name not in ("utils.py", "base.py", "helpers.py")
    assert re.findall(r"TODO|FIXME", path.read_text()) == []


@each_module
def test_a_module_opens_with_a_sentence_that_states_its_purpose(path):
    docstring = ast.get_docstring(tree_of(path))
    assert docstring, "no docstring"
    sentence = docstring.splitlines()[0].split("  ")[0]  # a source may follow: "...  PGM, Sec. 4"
    assert re.fullmatch(r"(?:[A-Z]|maskless\b|`).*[.?!]", sentence), sentence
    assert len(sentence.split()) >= 4, sentence


def test_no_public_class_name_is_defined_twice():
    nodes = [node for path in MODULES for node in tree_of(path).body]
    found = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, times in found.items() if times > 1 and not name.startswith("_")] == []


def test_the_reader_of_imports_sees_all_kinds():
    """Imports in functions, under TYPE_CHECKING, in try, relative ones and those from the front."""
    text = """
import os.path, torch
from maskless import logits as lg, Model
if TYPE_CHECKING:
    from maskless.train.run import RunConfig
try:
    import zstandard
except ImportError:
    pass
def f():
    import datasets
    from . import state
    from ..nn.blocks import Head
"""
    path = SOURCE / "train" / "imagined.py"
    nodes = list(statements(ast.parse(text), inside_functions=True))
    names = [name for node in nodes for name in absolute(node, path)]
    assert names == [
        *("os.path", "torch", "maskless.logits", "maskless.Model", "maskless.train.run.RunConfig", "zstandard"),
        *("datasets", "maskless.train.state", "maskless.nn.blocks.Head"),
    ]
    rooms = [room_named(name) for name in names if name.startswith("maskless")]
    assert rooms == ["logits", FRONT, "train", "train", "nn"]
    assert third_party(names) == {"torch", "zstandard", "datasets"}
    assert "datasets" not in str([ast.dump(n) for n in statements(ast.parse(text), inside_functions=False)])
