"""A step runs in a process of its own: its output and errors come back, and it may save when it is interrupted."""

import signal

import pytest

from maskless.reproduce import run


def test_a_child_gives_its_output_its_last_error_or_its_interruption(capsys):
    assert len(run.child(("python", "-c", "print('x' * 200_000)"))) == 200_001
    with pytest.raises(ValueError, match=r"^no such thing$"):
        run.child(("python", "-c", "import sys; print('error: no such thing\\nbye', file=sys.stderr); sys.exit(2)"))
    with pytest.raises(ValueError, match=r"ZeroDivisionError"):
        run.child(("python", "-c", "1 / 0"))
    with pytest.raises(KeyboardInterrupt):
        run.child(("python", "-c", "import sys; sys.exit(130)"))
    assert "no such thing" in capsys.readouterr().err  # which the user has seen


def test_an_interrupted_child_may_save(tmp_path):
    saves = "time.sleep(0.5); pathlib.Path(sys.argv[1]).touch(); sys.exit(130)"
    script = f"import os, pathlib, signal, sys, time; os.kill(os.getppid(), signal.SIGINT); {saves}"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in its background
    try:
        with pytest.raises(KeyboardInterrupt):
            run.child(("python", "-c", script, str(tmp_path / "state")))
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "state").exists()
