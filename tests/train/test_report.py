"""What a run leaves: metrics that no kill can spoil, and a picture of them."""

import io
import math

import pytest
from PIL import Image
from rich.console import Console

from maskless.train.report import MetricsFile, Throughput, _smooth, or_unknown, plot_losses, progress_bar, read_metrics


def test_lines_come_back_as_they_were_added(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []  # there is no file yet
    metrics = MetricsFile(path, 0)
    metrics.add(step=1, loss=0.1 + 0.2)
    metrics.add(step=1, validation=7.0)
    assert read_metrics(path) == [{"step": 1, "loss": 0.1 + 0.2}, {"step": 1, "validation": 7.0}] == metrics.lines
    metrics.close()


def test_what_is_not_a_number_is_unknown(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl", 0)
    metrics.add(step=1, validation=7.0, error=math.nan)
    metrics.close()
    assert read_metrics(metrics.path) == [{"step": 1, "validation": 7.0, "error": None}]
    assert [or_unknown(number, ".2f") for number in (0.125, math.nan)] == ["0.12", "?"]


def test_a_run_goes_on_behind_the_step_that_it_resumes_from(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, 0)
    for step in range(1, 6):
        first.add(step=step, loss=float(step))
    first.close()
    second = MetricsFile(path, 3)
    second.add(step=4, loss=40.0)
    second.close()
    expected = [{"step": step, "loss": loss} for step, loss in ((1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0))]
    assert read_metrics(path) == expected == second.lines


@pytest.mark.parametrize("left", ['{"step": 2, "lo', "{", '{"step": 2, "loss": 2.0', '{"step": 2, "loss": 2.'])
def test_a_half_written_line_is_dropped_and_the_next_one_stands_alone(tmp_path, left):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n' + left)
    assert read_metrics(path) == [{"step": 1, "loss": 1.0}]
    metrics = MetricsFile(path, 1)
    metrics.add(step=2, loss=20.0)
    metrics.close()
    assert path.read_text().splitlines() == ['{"step": 1, "loss": 1.0}', '{"step": 2, "loss": 20.0}']


def test_running_means_are_over_the_last_values():
    values = [float(n * n % 17) for n in range(60)]
    expected = [sum(values[max(0, i - 19) : i + 1]) / min(i + 1, 20) for i in range(60)]
    assert _smooth(values) == pytest.approx(expected)
    assert not len(_smooth([]))


@pytest.mark.parametrize("steps", [0, 1, 50])
def test_losses_are_drawn_as_a_picture(tmp_path, steps):
    trained = [{"step": n, "loss": 5 - n / 50, "seconds": n / 2} for n in range(1, steps + 1)]
    tested = [{"step": n, "perplexity": 90.0 - n, "seconds": n / 2} for n in range(10, steps + 1, 10)]
    plot_losses({"pgm": trained + tested, "mdlm": trained[: steps // 2]}, tmp_path / "loss.png")
    with Image.open(tmp_path / "loss.png") as image:
        assert image.format == "PNG"
        assert image.size == (1800, 504)
        assert len(image.convert("L").getcolors()) > 2  # something is drawn
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


def test_the_picture_shows_the_losses(tmp_path):
    for name, slope in (("falling", 1), ("rising", -1)):
        lines = [{"step": n, "loss": slope * n, "seconds": n} for n in range(50)]
        plot_losses({"pgm": lines}, tmp_path / f"{name}.png")
    falling, rising = (Image.open(tmp_path / f"{name}.png").convert("L") for name in ("falling", "rising"))
    assert list(falling.getdata()) != list(rising.getdata())


def test_the_bar_shows_its_text_where_it_is_wanted():
    for enabled in (True, False):
        file = io.StringIO()
        with progress_bar(Console(file=file, width=120), enabled=enabled) as bar:
            bar.add_task("training", total=1.0, text="loss 3.14", completed=0.5)
        assert (("50%" in file.getvalue()) and ("loss 3.14" in file.getvalue())) == enabled


def test_a_speed_leaves_out_what_warms_up():
    speed = Throughput(10, step=4, seconds=1.0)
    assert speed.look(6, 11.0) == 2  # the first look: all there is
    assert speed.look(6, 11.0) == 2  # and the end of a run that stops there
    assert speed.look(16, 13.0) == 50
    assert Throughput(10, step=4, seconds=1.0).look(4, 1.0) == 0


def test_what_is_measured_again_at_the_last_step_is_written_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, 0)
    metrics.add(step=2, loss=1.0)
    metrics.add(step=2, validation=1.5, seconds=3)
    metrics.close()
    again = MetricsFile(path, 2)
    again.add(step=2, validation=1.5, seconds=4)
    again.add(step=3, loss=0.5)
    again.close()
    noted = [["loss", "step"], ["seconds", "step", "validation"], ["loss", "step"]]
    assert [sorted(line) for line in read_metrics(path)] == noted
