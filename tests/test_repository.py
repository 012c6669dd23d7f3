"""What is checked in stays small: a clone brings every version of a file."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
LARGEST, WEIGHTS = 15 << 20, 64 << 20  # bytes of a file, and of all weights together


def test_no_file_is_large_and_the_weights_are_small_together():
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = done.stdout.split("\0")[:-1] if done.returncode == 0 else []
    found = [ROOT / name for name in names] or [*(ROOT / "src").rglob("*"), *(ROOT / "docs").rglob("*")]  # no clone
    sizes = {path: path.stat().st_size for path in found if path.is_file()}
    assert {path.name: size for path, size in sizes.items() if size > LARGEST} == {}
    assert 0 < sum(size for path, size in sizes.items() if path.suffix == ".safetensors") <= WEIGHTS
