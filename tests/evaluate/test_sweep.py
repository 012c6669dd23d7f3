"""A sweep over guidance: each point once, in a table and in a curve."""

import dataclasses
import json

import pytest
import torch
from PIL import Image
from test_images import TOY, pictures

from maskless.evaluate.images import SeenImages, fid, look
from maskless.evaluate.points import Watch
from maskless.evaluate.sweep import ImagePoint, plot, sweep, table


@pytest.fixture(scope="module")
def real() -> SeenImages:
    return look([pictures(60, 9)], TOY)


@pytest.fixture
def calls() -> list[float]:
    return []


@pytest.fixture
def sample(calls):
    def sample(guidance: float):
        calls.append(guidance)
        darker = pictures(40, 3).float() * (1 - 0.2 * abs(guidance - 1))
        return darker.to(torch.uint8).split(16)

    return sample


def written(path) -> dict:
    """What a file holds, less its times."""
    found = json.loads(path.read_text())
    for point in found["points"]:
        assert point.pop("images_per_second") > 0
    return found


def test_each_guidance_is_a_point_with_its_own_figures(sample, calls, real, tmp_path):
    points = list(sweep(sample, [0, 1, 2, 1], TOY, real, tmp_path / "sweep.json"))
    assert [point.guidance for point in points] == calls == [0, 1, 2]
    for point in points:
        assert point.quality.fid == fid(real.statistics, look(sample(point.guidance), TOY).statistics)
    assert points[1].quality.fid < min(points[0].quality.fid, points[2].quality.fid)
    with pytest.raises(ValueError, match="guidance nan is out of range"):
        list(sweep(sample, [1, float("nan")], TOY, real, tmp_path / "nan.json"))


def test_a_stopped_sweep_goes_on_and_computes_nothing_twice(sample, calls, real, tmp_path):
    path = tmp_path / "sweep.json"
    whole = list(sweep(sample, [0, 0.5, 1], TOY, real, tmp_path / "whole.json"))
    calls.clear()
    for _point in sweep(sample, [0, 0.5, 1], TOY, real, path):
        break
    assert list(sweep(sample, [0.5, 0, 1], TOY, real, path)) == [whole[1], whole[0], whole[2]]
    assert calls == [0, 0.5, 1]
    assert written(path) == written(tmp_path / "whole.json")
    calls.clear()
    assert list(sweep(sample, [2, 0], TOY, real, path))[1] == whole[0]
    assert calls == [2]
    assert len(json.loads(path.read_text())["points"]) == 4  # those of before are kept


def test_figures_made_otherwise_are_not_taken_for_ours(sample, calls, real, tmp_path):
    path = tmp_path / "sweep.json"
    list(sweep(sample, [1], TOY, real, path, settings={"steps": 8}))
    calls.clear()
    other = SeenImages(look([pictures(61, 9)], TOY).statistics)
    for what, arguments in {
        "steps 8, not 16": (TOY, real, {"steps": 16}),
        "reference": (TOY, other, {"steps": 8}),
        "network": (dataclasses.replace(TOY, sha256="3" * 64), real, {"steps": 8}),
    }.items():
        network, reference, settings = arguments
        with pytest.raises(ValueError, match=f"sweep.json was made with {what}.*: name another file"):
            list(sweep(sample, [1], network, reference, path, settings=settings))
    with pytest.raises(ValueError, match="was made with figures"):
        list(sweep(sample, [1], TOY, real, path, settings={"steps": 8}, score=False))
    for damaged in ('{"points": 3}', "[" * 100_000):
        path.write_text(damaged)
        with pytest.raises(ValueError, match=r"sweep.json is not the file of a sweep"):
            list(sweep(sample, [1], TOY, real, path))
    assert calls == []


def edited(path, edit) -> None:
    found = json.loads(path.read_text())
    edit(found)
    path.write_text(json.dumps(found))


def test_a_reference_is_known_by_its_mean_and_its_covariance(sample, calls, real, tmp_path):
    path, one = tmp_path / "sweep.json", real.statistics
    list(sweep(sample, [1], TOY, real, path))
    calls.clear()
    others = [dataclasses.replace(one, mean=mean) for mean in (one.mean + 1, -one.mean, one.mean.flip(0))]
    others += [dataclasses.replace(one, scatter=(one.scatter + one.scatter.diag().diag()) / 2)]  # of the same trace
    for other in others:
        with pytest.raises(ValueError, match=r"sweep.json was made with reference \[60, .*: name another file"):
            list(sweep(sample, [1], TOY, SeenImages(other), path))
    noise = 1 + 1e-7 * torch.linspace(-1, 1, len(one.mean), dtype=torch.float64)  # what another device adds
    near = dataclasses.replace(one, mean=one.mean * noise, scatter=one.scatter * noise.outer(noise))
    list(sweep(sample, [1], TOY, SeenImages(near), path))
    assert calls == []


@pytest.mark.parametrize("reference", [[60, 1.0], [60, "1", 1.0, 1.0], [60], 60])
def test_a_reference_that_says_something_else_is_another(reference, sample, real, tmp_path):
    path = tmp_path / "sweep.json"
    list(sweep(sample, [1], TOY, real, path))
    edited(path, lambda found: found["conditions"].update(reference=reference))
    with pytest.raises(ValueError, match="was made with reference"):
        list(sweep(sample, [1], TOY, real, path))


def test_speeds_of_other_batches_say_so(real, tmp_path):
    """The pictures are the same, so their figures are kept."""
    path, images = tmp_path / "sweep.json", pictures(40, 3)
    list(sweep(lambda guidance: images.split(16), [0, 1], TOY, real, path))
    points = list(sweep(lambda guidance: images.split(8), [0, 1, 2], TOY, real, path))
    assert [point.drawn for point in points] == ["batch 16, 1 x cpu", "batch 16, 1 x cpu", "batch 8, 1 x cpu"]
    cells = [line.split("|")[-2].strip() for line in table(points).splitlines()[2:5]]
    assert [cell.partition(" ")[2] for cell in cells] == [f"({point.drawn})" for point in points]
    assert "batch" not in table(points[:2])


def test_without_logits_the_score_is_refused_unless_it_is_not_asked_for(sample, calls, real, tmp_path):
    silent = dataclasses.replace(TOY, classes=0, body=lambda images: (TOY.body(images)[0], None))
    with pytest.raises(ValueError, match="toy has features but no logits"):
        list(sweep(sample, [1], silent, real, tmp_path / "sweep.json"))
    assert calls == []
    (point,) = sweep(sample, [1], silent, real, tmp_path / "sweep.json", score=False)
    assert point.quality.inception_score is None
    (same,) = sweep(sample, [1], TOY, real, tmp_path / "other.json", score=False)
    assert same == point


def test_the_speed_is_that_of_drawing_and_of_warm_batches(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def batches(*seconds):
        for each in seconds:
            now[0] += each
            yield pictures(8)

    def speed(*seconds) -> float:
        watch = Watch(batches(*seconds))
        for _ in watch:
            now[0] += 100  # what is done with a batch
        return watch.speed()

    assert speed(50, 2, 2) == pytest.approx(4.0)
    assert speed(2) == pytest.approx(4.0)
    assert speed() == 0


@pytest.fixture
def points(sample, real, tmp_path) -> list[ImagePoint]:
    kept = look([pictures(60, 9)], TOY, keep=True)
    return list(sweep(sample, [2, 0, 1], TOY, kept, tmp_path / "sweep.json"))


def test_the_table_is_in_order_and_marks_the_best(points):
    lines = table(points).splitlines()
    assert lines[0] == "| guidance | FID | Inception Score | precision | recall | images/s |"
    assert [line.split("|")[1].strip() for line in lines[2:5]] == ["0", "1", "2"]
    best = min(points, key=lambda point: point.quality.fid)
    assert f"| **{best.quality.fid:.2f}** |" in lines[2 + int(best.guidance)]
    assert lines[-1].startswith("40 images against 60; features of toy (sha256 000000000000); not a network known")
    standard = [dataclasses.replace(p, quality=dataclasses.replace(p.quality, standard=True)) for p in points]
    assert "not a network" not in table(standard)
    unscored = [dataclasses.replace(p, quality=dataclasses.replace(p.quality, inception_score=None)) for p in points]
    assert "Inception" not in table(unscored)


def test_the_curve_is_a_picture_and_half_as_wide_without_scores(points, tmp_path):
    plot({"halton": points, "confidence": points[:2]}, tmp_path / "both.png")
    unscored = [dataclasses.replace(p, quality=dataclasses.replace(p.quality, inception_score=None)) for p in points]
    plot({"halton": unscored}, tmp_path / "fid.png")
    widths = [Image.open(tmp_path / name).size[0] for name in ("both.png", "fid.png")]
    assert widths[0] == 2 * widths[1]
    with pytest.raises(ValueError, match="no points: expected at least one guidance"):
        table([])
    with pytest.raises(ValueError, match="nothing to plot"):
        plot({"halton": []}, tmp_path / "none.png")
    fewer = dataclasses.replace(points[0], quality=dataclasses.replace(points[0].quality, images=39))
    with pytest.raises(ValueError, match=r"figures that cannot be compared: 40 images against 60.*; but 39 images"):
        plot({"halton": points, "confidence": [fewer]}, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
