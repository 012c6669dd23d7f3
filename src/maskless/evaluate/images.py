"""How good images are: FID, Inception Score, precision and recall, from the features of a named network.

Statistics are float64, streamed over batches and exact under any split of the images: over batches, files, processes.

Shapes: N images, H x W pixels, D features, K classes, k neighbours.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor

from maskless.evaluate.inception import Features
from maskless.files import write_aside

CHUNKS = 10  # of the Inception Score
NEIGHBOURS = 3  # of precision and recall


@dataclass(frozen=True)
class Statistics:
    """Count, mean and scatter (the sum of centred squares) of features; `a + b` is that of both sets together."""

    n: int
    mean: Tensor  # (D,) float64
    scatter: Tensor  # (D, D) float64
    network: str = ""  # sha256 of the network that made the features, as `Features` has it

    @classmethod
    def of(cls, features: Tensor, network: str = "") -> Statistics:
        """(N, D) -> statistics, N may be 0"""
        if features.ndim != 2 or features.shape[1] == 0:
            raise ValueError(f"features {tuple(features.shape)}: expected (N, D)")
        x = _exact(features)
        if not x.isfinite().all():
            bad = int((~x.isfinite()).any(1).sum())
            raise ValueError(f"{bad} of {len(x)} images have features that are not finite numbers")
        mean = x.mean(0) if len(x) else x.new_zeros(x.shape[1])
        return cls(len(x), mean, (x - mean).T @ (x - mean), network)

    def __add__(self, other: Statistics) -> Statistics:
        """Chan et al. 1979: means by weight, scatters summed, with what lies between the means."""
        _same_network(self, other)
        n = self.n + other.n
        apart = other.mean.to(self.mean.device) - self.mean
        between = apart.outer(apart) * (self.n * other.n / max(n, 1))
        mean = self.mean + apart * (other.n / max(n, 1))
        return Statistics(n, mean, self.scatter + other.scatter.to(self.mean.device) + between, self.network)

    @property
    def covariance(self) -> Tensor:
        """(D, D), unbiased"""
        if self.n < 2:
            raise ValueError(f"{self.n} images are too few for a covariance: expected 2 or more")
        return self.scatter / (self.n - 1)

    def save(self, path: Path) -> None:
        def write(aside: Path) -> None:
            mean, scatter = self.mean.cpu().numpy(), self.scatter.cpu().numpy()
            with aside.open("wb") as file:  # given a name, numpy would add .npz
                np.savez(file, n=self.n, mean=mean, scatter=scatter, network=self.network)

        write_aside(path, write)

    @classmethod
    def load(cls, path: Path) -> Statistics:
        """What `save` wrote, read without running code."""
        expected = f"{path} holds no image statistics: expected n, mean, scatter and network in an .npz"
        if not path.is_file():
            raise ValueError(f"no image statistics at {path}")
        try:
            with np.load(path, allow_pickle=False) as arrays:
                n, network = int(arrays["n"]), str(arrays["network"])
                mean, scatter = (torch.from_numpy(arrays[name]) for name in ("mean", "scatter"))
        except (OSError, KeyError, ValueError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"{expected}; {error}") from None
        D = mean.numel()
        if n < 0 or mean.shape != (D,) or scatter.shape != (D, D) or {mean.dtype, scatter.dtype} != {torch.float64}:
            raise ValueError(f"{expected}; mean {tuple(mean.shape)}, scatter {tuple(scatter.shape)}, n {n}")
        if not (mean.isfinite().all() and scatter.isfinite().all()):
            raise ValueError(f"{path} holds image statistics that are not finite numbers")
        return cls(n, mean, scatter, network)


def fid(real: Statistics, made: Statistics) -> float:
    """The Frechet distance of two Gaussians, |m - m'|^2 + tr(S + S' - 2 (S S')^(1/2)).  Heusel et al. 2017, Eq. 6

    The last trace is the sum of the singular values of F^T F', for S = F F^T. Unlike the root of the product S S',
    which is not symmetric, this needs no complex numbers and nothing added to the diagonal where S is singular, as it
    is for fewer images than features; and an error of rounding stays as it is, where a square root would magnify it.
    """
    _same_network(real, made)
    if real.mean.shape != made.mean.shape:
        raise ValueError(f"features of {len(real.mean)} and {len(made.mean)} dimensions cannot be compared")
    device = made.mean.device  # a GPU takes a second where a CPU that others share takes half a minute
    one, other = real.covariance.to(device), made.covariance
    apart = (real.mean.to(device) - made.mean).square().sum()
    root = torch.linalg.svdvals(_factor(one).T @ _factor(other)).sum()
    return max(0.0, float(apart + one.trace() + other.trace() - 2 * root))


def inception_score(logits: Tensor, *, chunks: int = CHUNKS, seed: int = 0) -> tuple[float, float]:
    """exp E KL(p(y|x) || p(y)) in each of the chunks, mean and standard deviation.  Salimans et al. 2016

    logits (N, K). The images are shuffled first: in the order of their classes a chunk would hold only some of them.
    """
    if logits.ndim != 2 or len(logits) < chunks or chunks < 1:
        raise ValueError(
            f"logits {tuple(logits.shape)} in {chunks} chunks: expected (N, K) with {chunks} images or more"
        )
    if not logits.isfinite().all():
        raise ValueError("the logits are not finite numbers")
    shuffled = torch.randperm(len(logits), generator=torch.Generator().manual_seed(seed)).to(logits.device)
    scores = []
    for rows in shuffled.tensor_split(chunks):
        log_p = _exact(logits[rows]).log_softmax(1)
        p = log_p.exp()
        marginal = p.mean(0)
        scores.append((p * log_p).sum(1).mean() - torch.special.xlogy(marginal, marginal).sum())
    each = torch.stack(scores).exp()
    return float(each.mean()), float(each.std(correction=0))


def precision_recall(real: Tensor, made: Tensor, *, k: int = NEIGHBOURS, batch: int = 1024) -> tuple[float, float]:
    """The share of made images in the manifold of the real ones, and of real ones in that of the made.

    A manifold is the balls around its images that reach to their k-th neighbour.  Kynkaanniemi et al. 2019, Eq. 1-2
    real (N, D), made (M, D); the distances of at most `batch` images are in memory at once.
    """
    for name, x in (("real", real), ("made", made)):
        if x.ndim != 2 or len(x) <= k:
            raise ValueError(f"{name} features {tuple(x.shape)}: expected (N, D) with more than k = {k} images")
        if not x.isfinite().all():
            raise ValueError(f"{name} features are not finite numbers")
    if real.shape[1] != made.shape[1]:
        raise ValueError(f"features of {real.shape[1]} and {made.shape[1]} dimensions cannot be compared")
    if k < 1 or batch < 1:
        raise ValueError(f"k {k}, batch {batch}: expected 1 or more")
    a, b = _exact(real), _exact(made)
    centre = a.mean(0)  # large means would cost digits of the distances
    a, b = a - centre, b.to(a.device) - centre
    return _inside(b, a, _radii(a, k, batch), batch), _inside(a, b, _radii(b, k, batch), batch)


@dataclass(frozen=True)
class SeenImages:
    """A set of images as a network saw it, those of all processes together."""

    statistics: Statistics
    logits: Tensor | None = None  # (N, K)
    features: Tensor | None = None  # (N, D), where they were to be kept


@dataclass(frozen=True, kw_only=True)
class ImageQuality:
    """The figures of a set of images, with the network and the sizes of the sets that they belong to."""

    fid: float
    inception_score: float | None
    inception_score_error: float | None  # standard deviation over chunks
    precision: float | None
    recall: float | None
    images: int
    reference: int  # images that they were compared with
    network: str
    sha256: str
    standard: bool  # a network known to give the published figures


def look(
    batches: Iterable[Tensor],
    network: Features,
    *,
    keep: bool = False,
    at_once: int = 256,
    on_batch: Callable[[int], None] | None = None,
) -> SeenImages:
    """What a network sees in batches of uint8 images (n, H, W, 3), each process in its own, put together for all.

    keep: also the features themselves, for precision and recall. All processes must call this, some with no batch.
    """
    device = torch.device("cpu") if network.device.type == "mps" else network.device
    total = Statistics.of(torch.zeros(0, network.width, device=device), network.sha256)
    kept, scores = [torch.zeros(0, network.width)], [torch.zeros(0, network.classes)]
    for images in batches:
        for part in images.split(at_once):
            features, logits = network(part)
            total += Statistics.of(features, network.sha256)
            if keep:
                kept.append(features.float().cpu())
            if logits is not None:
                scores.append(logits.float().cpu())
        if on_batch is not None:
            on_batch(len(images))
    logits = _joined(torch.cat(scores)) if network.classes else None
    return SeenImages(_merged(total), logits, _joined(torch.cat(kept)) if keep else None)


def quality(made: SeenImages, real: SeenImages, network: Features) -> ImageQuality:
    """The figures of made images against real ones; those that the network or the features do not allow are None."""
    for seen in (made, real):
        if seen.statistics.network != network.sha256:
            raise ValueError(f"statistics of the network {short(seen.statistics.network)}, not {short(network.sha256)}")
    score, error = (None, None) if made.logits is None else inception_score(made.logits)
    precision, recall = None, None
    if made.features is not None and real.features is not None:
        precision, recall = precision_recall(real.features.to(network.device), made.features.to(network.device))
    return ImageQuality(
        fid=fid(real.statistics, made.statistics),
        inception_score=score,
        inception_score_error=error,
        precision=precision,
        recall=recall,
        images=made.statistics.n,
        reference=real.statistics.n,
        network=network.name,
        sha256=network.sha256,
        standard=network.standard,
    )


def need_logits(network: Features) -> None:
    """Raise a ValueError for a network from which there is no Inception Score."""
    if not network.classes:
        raise ValueError(
            f"{network.name} has features but no logits, so there is no Inception Score: "
            "expected torch-fidelity, or a file with Inception-v3's last layer"
        )


def _exact(x: Tensor) -> Tensor:
    """In float64, on a device that has it."""
    return (x.cpu() if x.device.type == "mps" else x).double()


def _factor(covariance: Tensor) -> Tensor:
    """F (D, r) with F F^T = covariance; directions within rounding of no spread are left out."""
    values, vectors = torch.linalg.eigh(covariance)
    there = values > values[-1].clamp_min(0) * len(values) * torch.finfo(torch.float64).eps
    return vectors[:, there] * values[there].sqrt()


def _squared_distances(x: Tensor, y: Tensor) -> Tensor:
    return torch.addmm(x.square().sum(1)[:, None] + y.square().sum(1), x, y.T, alpha=-2).clamp_min(0)


def _radii(x: Tensor, k: int, batch: int) -> Tensor:
    """The squared distance from each row to its k-th nearest other row; the nearest is itself.  (N, D) -> (N,)"""
    return torch.cat([_squared_distances(rows, x).kthvalue(k + 1).values for rows in x.split(batch)])


def _inside(points: Tensor, centres: Tensor, radii: Tensor, batch: int) -> float:
    """The share of points that lie in a ball around at least one centre."""
    rounding = 1e-13 * float(torch.cat([points, centres]).square().sum(1).max())  # an equal point is at distance 0
    inside = [(_squared_distances(some, centres) <= radii + rounding).any(1) for some in points.split(batch)]
    return float(torch.cat(inside).double().mean())


def _merged(mine: Statistics) -> Statistics:
    """The statistics of all processes; the same on each, merged in their order."""
    if PartialState().num_processes == 1:
        return mine
    return reduce(Statistics.__add__, gather_object([replace(mine, mean=mine.mean.cpu(), scatter=mine.scatter.cpu())]))


def _joined(mine: Tensor) -> Tensor:
    """The rows of all processes, dealt back as the pictures were dealt out: one of each in turn. Numbers may differ."""
    parts: list[Tensor] = gather_object([mine])
    turns = [rank + len(parts) * torch.arange(len(part)) for rank, part in enumerate(parts)]
    return torch.cat(parts)[torch.cat(turns).argsort()]


def _same_network(one: Statistics, other: Statistics) -> None:
    if one.network != other.network:
        raise ValueError(f"statistics of two networks, {short(one.network)} and {short(other.network)}: expected one")


def short(sha256: str) -> str:
    """The identity of a network for a reader: its first digits, and what it takes where that belongs to it."""
    return f"sha256 {sha256[:12]}{sha256[64:]}" if sha256 else "without a name"
