"""What is checked in stays small: a clone brings every version of a file."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LARGEST, WEIGHTS = 15 << 20, 64 << 20  # bytes of a file, and of all weights together


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = done.stdout.split("\0")[:-1] if done.returncode == 0 else []
    found = [ROOT / name for name in names] or [*(ROOT / "src").rglob("*"), *(ROOT / "docs").rglob("*")]  # no clone
    return [path for path in found if path.is_file()]


def test_no_file_is_large(tracked):
    assert {path.name: path.stat().st_size for path in tracked if path.stat().st_size > LARGEST} == {}


def test_the_weights_are_small_together(tracked):
    sizes = [path.stat().st_size for path in tracked if path.suffix == ".safetensors"]
    assert sizes
    assert sum(sizes) <= WEIGHTS
