"""FID, Inception Score, precision and recall: identities, naive references, and statistics under any split."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import TCPStore

from maskless.evaluate.images import (
    SeenImages,
    Statistics,
    fid,
    inception_score,
    look,
    need_logits,
    precision_recall,
    quality,
)
from maskless.evaluate.inception import Features
from maskless.evaluate.sweep import sweep

D, EPS = 6, torch.finfo(torch.float64).eps


def normal(n: int, seed: int = 0, width: int = D) -> Tensor:
    """Features that are correlated, of very different spread."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, width, generator=generator, dtype=torch.float64)
    turn = torch.randn(width, width, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    return x @ (turn * torch.logspace(-1, 1, width, dtype=torch.float64)) + 3


def toy_body(images: Tensor) -> tuple[Tensor, Tensor | None]:
    """(n, 3, H, W) -> 6 features and 4 logits"""
    x = images.float()
    found = torch.cat([x.mean((2, 3)), x.amax((2, 3))], 1) / 64
    return found, found[:, :4] * 2


TOY = Features(toy_body, "toy", "0" * 64, False, 6, 4, torch.device("cpu"))


def pictures(n: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (n, 4, 5, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def of(x: Tensor, network: str = "") -> Statistics:
    return Statistics.of(x, network)


def same(a: Statistics, b: Statistics, tolerance: float = 1e-11) -> None:
    assert a.n == b.n
    for one, other in ((a.mean, b.mean), (a.scatter, b.scatter)):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * float(b.scatter.abs().max() or 1))


def test_statistics_are_numpys():
    x = normal(50).float().double()
    found = of(x.float())
    sums = {"rtol": 0, "atol": 50 * EPS * float(x.abs().max())}  # of 50
    np.testing.assert_allclose(found.mean, x.numpy().mean(0), **sums)
    covariance = np.cov(x.numpy(), rowvar=False)
    np.testing.assert_allclose(found.covariance, covariance, rtol=0, atol=50 * EPS * float(x.square().max()))
    assert found.covariance.dtype == torch.float64


@given(st.lists(st.integers(0, 40), max_size=4))
def test_merging_any_split_gives_the_whole(cuts):
    x = normal(40) + 1e4  # a mean far larger than the spread
    edges = [0, *sorted(cuts), 40]
    parts = [of(x[a:b]) for a, b in itertools.pairwise(edges)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    same(total, of(x))


def test_a_set_is_at_no_distance_from_itself():
    for n in (3, D, 200):  # also where the covariance is singular
        assert fid(of(normal(n)), of(normal(n))) < 1e-6
    x = normal(30, width=300)
    assert fid(of(x), of(x.flip(0))) < 1e-6 * float(of(x).covariance.trace())


def gaussian(mean: list[float], covariance: Tensor, n: int = 101) -> Statistics:
    return Statistics(n, torch.tensor(mean, dtype=torch.float64), covariance * (n - 1))


def test_the_distance_of_gaussians_with_common_axes_is_the_analytic_one():
    turn = torch.linalg.qr(normal(4, width=4)).Q
    a, b = torch.tensor([4.0, 1, 9, 0]).double(), torch.tensor([1.0, 1, 25, 16]).double()
    one, other = (gaussian([0.0] * 4, turn @ x.diag() @ turn.T) for x in (a, b))
    # What rounding leaves of a spread of 0, some D eps |S|, counts by its root: 2 (16 * 9 D eps)^(1/2) = 7e-7 at most
    assert fid(one, other) == pytest.approx(float((a.sqrt() - b.sqrt()).square().sum()), abs=1e-6)
    assert fid(other, one) == pytest.approx(1 + 0 + 4 + 16, abs=1e-6)


def naive_fid(a: Tensor, b: Tensor) -> float:
    """Word for word: the trace of a root of the product, from its eigenvalues.

    In 40 digits: an eigenvalue of a product errs by eps |S| |S'| cond(S)^(1/2), its root by more the smaller it is, so
    that a float64 may lose all its digits.
    """

    def moments(x: mpmath.matrix) -> tuple[mpmath.matrix, mpmath.matrix]:
        mean = x.T * mpmath.ones(x.rows, 1) / x.rows
        centred = x - mpmath.ones(x.rows, 1) * mean.T
        return mean, centred.T * centred / (x.rows - 1)

    with mpmath.workdps(40):
        (m, s), (n, t) = (moments(mpmath.matrix(x.tolist())) for x in (a, b))
        roots = [mpmath.sqrt(value).real for value in mpmath.eig(s * t, left=False, right=False)]
        traces = [s[i, i] + t[i, i] for i in range(len(m))]
        return float(mpmath.norm(m - n) ** 2 + mpmath.fsum(traces) - 2 * mpmath.fsum(roots))


@pytest.mark.parametrize("width", [2, 6, 12])
def test_the_distance_is_that_of_a_naive_reference(width):
    a, b = normal(60, 1, width), normal(90, 2, width) * torch.linspace(0.5, 2, width, dtype=torch.float64)
    bound = 90 * width * EPS * float(of(a).covariance.trace() + of(b).covariance.trace())  # sums of 90 and of width
    assert fid(of(a), of(b)) == pytest.approx(naive_fid(a, b), rel=0, abs=bound)


def test_singular_covariances_add_what_they_have():
    """Two sets on lines at right angles: nothing in common, so the spreads add up."""
    line, zero = torch.linspace(-2, 2, 9, dtype=torch.float64), torch.zeros(9, dtype=torch.float64)
    one, other = torch.stack([line, zero], 1), torch.stack([zero, line], 1)
    assert fid(of(one), of(other)) == pytest.approx(2 * float(line.var()), rel=1e-12)
    assert fid(of(zero[:, None].expand(9, 2)), of(one)) == pytest.approx(float(line.var()), rel=1e-12)


def test_equal_predictions_score_one_and_certain_distinct_ones_the_number_of_classes():
    assert inception_score(torch.zeros(100, 7)) == pytest.approx((1, 0), abs=1e-12)
    assert inception_score(torch.randn(1, 7).expand(100, 7)) == pytest.approx((1, 0), abs=1e-6)
    certain = torch.eye(7).repeat(10, 1) * 1e4
    assert inception_score(certain, chunks=1) == pytest.approx((7, 0), rel=1e-9)


def test_the_score_is_that_of_a_naive_reference():
    logits = torch.randn(103, 5, generator=torch.Generator().manual_seed(3)) * 2
    p = torch.softmax(logits.double(), 1).numpy()
    order = torch.randperm(103, generator=torch.Generator().manual_seed(4)).numpy()
    scores = []
    for rows in np.array_split(order, 10):
        kl = p[rows] * np.log(p[rows] / p[rows].mean(0))
        scores.append(np.exp(kl.sum(1).mean()))
    assert inception_score(logits, seed=4) == pytest.approx((np.mean(scores), np.std(scores)), rel=1e-9)


def naive_precision_recall(real: np.ndarray, made: np.ndarray, k: int) -> tuple[float, float]:
    def radius(x: np.ndarray, i: int) -> float:
        return sorted(np.linalg.norm(x[i] - x[j]) for j in range(len(x)) if j != i)[k - 1]

    def share(points: np.ndarray, centres: np.ndarray) -> float:
        radii = [radius(centres, i) for i in range(len(centres))]
        return float(
            np.mean([any(np.linalg.norm(p - c) <= r for c, r in zip(centres, radii, strict=True)) for p in points])
        )

    return share(made, real), share(real, made)


@pytest.mark.parametrize(("k", "batch"), [(1, 1), (3, 7), (3, 1000), (5, 16)])
def test_precision_and_recall_are_those_of_a_naive_reference_in_batches_of_any_size(k, batch):
    generator = torch.Generator().manual_seed(k)
    real = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    made = torch.randn(31, 3, generator=generator, dtype=torch.float64) * 0.8 + 1.1
    expected = naive_precision_recall(real.numpy(), made.numpy(), k)
    assert 0 < expected[0] < 1
    assert 0 < expected[1] < 1
    assert precision_recall(real, made, k=k, batch=batch) == expected


def test_equal_sets_have_all_and_disjoint_ones_nothing():
    x = normal(50).float() + 1e3
    assert precision_recall(x, x.flip(0), batch=8) == (1, 1)
    assert precision_recall(x, x + 1e4) == (0, 0)
    copies = x.repeat(4, 1)  # balls of no size
    assert precision_recall(copies, copies.flip(0)) == (1, 1)
    assert precision_recall(x, x[:10], k=3)[0] == 1  # part of the real ones


def test_statistics_go_to_a_file_and_back(tmp_path):
    one = of(normal(20), "abc")
    one.save(tmp_path / "statistics.npz")
    again = Statistics.load(tmp_path / "statistics.npz")
    assert again.mean.equal(one.mean)
    assert again.scatter.equal(one.scatter)
    assert (again.n, again.network) == (20, "abc")
    assert [path.name for path in tmp_path.iterdir()] == ["statistics.npz"]
    same(again + of(normal(30, 5), "abc"), of(torch.cat([normal(20), normal(30, 5)]), "abc"))  # and go on from there


def test_other_files_are_one_clear_line(tmp_path):
    def wrong(name: str, **arrays: object) -> Path:
        np.savez(tmp_path / name, **arrays)
        return tmp_path / name

    good = {"n": 3, "mean": np.zeros(2), "scatter": np.eye(2), "network": "x"}
    assert Statistics.load(wrong("good.npz", **good)).n == 3
    (tmp_path / "text.npz").write_text("no zip")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "good.npz").read_bytes()[:100])
    np.save(tmp_path / "one.npy", np.zeros(2))
    paths = [
        *(tmp_path / name for name in ("text.npz", "cut.npz", "one.npy")),
        wrong("few.npz", n=3, mean=np.zeros(2)),
        wrong("pickled.npz", **good | {"mean": np.array([object()])}),
        wrong("shape.npz", **good | {"scatter": np.eye(3)}),
        wrong("half.npz", **good | {"mean": np.zeros(2, np.float32)}),
    ]
    for path in paths:
        with pytest.raises(ValueError, match=f"{path.name} holds no image statistics") as error:
            Statistics.load(path)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="not finite"):
        Statistics.load(wrong("nan.npz", **good | {"mean": np.array([np.nan, 0])}))
    with pytest.raises(ValueError, match="no image statistics at"):
        Statistics.load(tmp_path / "missing.npz")


def test_mistakes_are_one_clear_line():
    x, nan = normal(10), normal(10)
    nan[3, 2] = torch.nan
    for mistake, line in [
        (lambda: of(nan), "1 of 10 images have features that are not finite numbers"),
        (lambda: of(x[0]), r"features \(6,\): expected \(N, D\)"),
        (lambda: fid(of(x[:1]), of(x)), "1 images are too few for a covariance: expected 2 or more"),
        (lambda: fid(of(x), of(x[:, :4])), "features of 6 and 4 dimensions cannot be compared"),
        (lambda: fid(of(x, "a" * 64), of(x, "b" * 64)), "of two networks, sha256 aaaaaaaaaaaa and sha256 bbb"),
        (lambda: of(x, "a") + of(x, "b"), "statistics of two networks"),
        (lambda: inception_score(torch.zeros(9, 5)), "expected .* with 10 images or more"),
        (lambda: inception_score(torch.full((20, 5), torch.nan)), "logits are not finite"),
        (lambda: precision_recall(x, nan), "made features are not finite numbers"),
        (lambda: precision_recall(x[:3], x), r"real features \(3, 6\): expected .* more than k = 3 images"),
        (lambda: precision_recall(x, x[:, :4]), "features of 6 and 4 dimensions"),
        (lambda: precision_recall(x, x, k=0), "k 0, batch 1024: expected 1 or more"),
        (lambda: need_logits(dataclasses.replace(TOY, classes=0)), "toy has features but no logits, so there is no"),
    ]:
        with pytest.raises(ValueError, match=line):
            mistake()


def test_looking_does_not_depend_on_the_batches():
    images, counted = pictures(50), []
    whole = look([images], TOY, keep=True)
    parts = look(iter(images.split(7)), TOY, keep=True, at_once=3, on_batch=counted.append)
    same(parts.statistics, whole.statistics)
    assert parts.features.equal(whole.features)
    assert parts.logits.equal(whole.logits)
    assert counted == [7] * 7 + [1]
    assert whole.features.shape == (50, 6)
    assert look([images], TOY).features is None


def test_a_quality_names_its_network_and_its_sizes():
    made, real = look([pictures(40)], TOY, keep=True), look([pictures(60, 1)], TOY, keep=True)
    found = quality(made, real, TOY)
    assert found.fid == fid(real.statistics, made.statistics)
    assert (found.inception_score, found.inception_score_error) == inception_score(made.logits)
    assert (found.precision, found.recall) == precision_recall(real.features, made.features)
    assert (found.images, found.reference, found.network, found.sha256) == (40, 60, "toy", "0" * 64)
    assert json.loads(json.dumps(dataclasses.asdict(found)))["standard"] is False
    less = quality(SeenImages(made.statistics), SeenImages(real.statistics), TOY)
    assert (less.fid, less.inception_score, less.precision) == (found.fid, None, None)
    with pytest.raises(ValueError, match="statistics of the network sha256 111111111111, not sha256 000000000000"):
        quality(SeenImages(dataclasses.replace(made.statistics, network="1" * 64)), real, TOY)


def test_two_processes_see_what_one_sees(tmp_path):
    """Shares that differ in size and in their number of batches; and a sweep in two processes."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # here, so that it holds its port
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    command = [sys.executable, str(Path(__file__).parent / "images_together.py"), str(tmp_path)]
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    started = [subprocess.Popen(command, env=os.environ | common | rank) for rank in ranks]
    assert [process.wait(300) for process in started] == [0, 0]
    one, real = look([pictures(51)], TOY, keep=True), look([pictures(40, 1)], TOY)
    alone = sweep(
        lambda guidance: [pictures(50, int(guidance))], [1.0, 0.0, 1.0, 2.0], TOY, real, tmp_path / "one.json"
    )
    figures = {point.guidance: (point.quality.fid, point.quality.inception_score) for point in alone}
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert found["n"] == 51
        torch.testing.assert_close(found["scatter"], one.statistics.scatter, rtol=1e-11, atol=1e-11)
        assert found["logits"].equal(one.logits)
        assert found["features"].equal(one.features)
        for (distance, score), guidance in zip(found["figures"], (1.0, 0.0, 1.0, 2.0), strict=True):
            assert distance == pytest.approx(figures[guidance][0], rel=1e-9)
            assert score == pytest.approx(figures[guidance][1], rel=1e-9)
        assert found["sampled"] == [0.0, 2.0]  # 1.0 was there already
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.pt", "1.pt", "one.json", "sweep.json"]
