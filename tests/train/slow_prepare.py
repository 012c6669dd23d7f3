"""`maskless prepare` with small parts that take their time, and are named, so that a kill meets it half-way.

Started by test_prepare_together.py.
"""

import sys
import time
from pathlib import Path
from typing import Any

from maskless.cli import main
from maskless.data import parts

write = parts._write


def slowly(path: Path, *given: Any, **how: Any) -> None:
    time.sleep(0.02)
    write(path, *given, **how)
    print("made", path.name, file=sys.stderr)


if __name__ == "__main__":
    parts.PART_CHARACTERS, parts.BATCH_CHARACTERS, parts._write = 6_000, 2_000, slowly
    sys.argv[0] = "maskless"
    main()
