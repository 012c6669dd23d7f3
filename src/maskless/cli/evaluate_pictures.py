"""What `evaluate` measures of an image model: FID and its companions, against real ones."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import PartialState

from maskless.checkpoint import Model, digest
from maskless.cli import show
from maskless.cli.checks import check_places, numbers
from maskless.cli.evaluate_tables import image_likelihoods
from maskless.cli.options import Given
from maskless.cli.pictures import side_of
from maskless.data.image_tokens import holds_images, open_images
from maskless.decide import settled
from maskless.evaluate import inception, sets
from maskless.evaluate.images import SeenImages
from maskless.evaluate.orders import image_ways
from maskless.evaluate.sweep import plot, sweep, table
from maskless.files import json_text
from maskless.how import How
from maskless.images import codec_of, grid_of
from maskless.train.processes import processes


def evaluate_pictures(
    model: Model,
    features: Given,
    kept: Given,
    as_json: bool,
    *,
    reference: str | None = None,
    out: Path | None = None,
    samples: int = 50_000,
    batch: int | None = None,
    steps: str | None = None,
    guidance: str = "0",
    **how: Any,
) -> None:
    """Figures of what a model draws, with each guidance; a process draws its share, the main one shows them."""
    if reference is None or out is None:
        raise ValueError("this is an image model: expected --reference PATH (real ones) and --out FILE.json")
    if steps is not None:
        how["steps"], *more = numbers("steps", steps, int, "8,16,32")
        if more:
            raise ValueError(f"--steps {steps}: expected one number for pictures; what may be a list is --guidance")
    guidances = numbers("guidance", guidance, float, "0,1,2,3")
    network, valid, statistics = find_features(**features), kept.get("valid"), kept.get("save_statistics")
    sets.check_drawing(model, guidances, **how)
    check_places(out, statistics)
    at_once = (500 if model.device.type == "cuda" else 25) if batch is None else batch  # 50,000 in equal parts
    sample = sets.drawn(model, samples, at_once, **how)
    side, codec = side_of(model), codec_of(model)
    pictures = sets.real(reference, valid)
    sets.check_share(valid, pictures)
    seen = look(pictures, network, side, codec.channels, statistics)
    settings = dataclasses.asdict(settled(model, How(**how), model.config.length - 1))
    settings |= {"model": digest(model.network, codec), "samples": samples}
    del settings["guidance"]  # which each point has
    if settings["regions"] is None:
        del settings["regions"]  # as files of before have it
    swept = partial(sweep, sample, guidances, network, seen, out, score=network.classes > 0, settings=settings)
    points = show.sweeping(swept, len(guidances), samples, lambda point: f"w = {point.guidance:g}")
    if not PartialState().is_main_process:
        return
    curve = out.with_suffix(".png")
    if len(points) > 1:
        plot({out.stem: points}, curve)
    if as_json:
        print(out.read_text(), end="")
        return
    print(table(points))
    show.note(f"figures: {out}" + (f"   curve: {curve}" if len(points) > 1 else ""))


def evaluate_bound(
    model: Model,
    as_json: bool,
    *,
    seed: int,
    data: list[str] | None = None,
    split: str = "valid",
    sequences: int = 2048,
    samples: int = 8,
    batch: int = 32,
    steps: str | None = None,
    counts: str | None = None,
) -> None:
    """The likelihood of prepared images: a bound over all orders, and of a chain along each order that it knows."""
    if data is None or len(data) != 1 or not holds_images(data[0]):
        raise ValueError("the likelihood of which images? expected --data DIR, a prepared folder of them")
    prepared = open_images(data[0])
    if prepared.grid != grid_of(model) or prepared.vocab > model.config.vocab + 1:  # MaskGIT has no row for the BOS
        has = f"a grid of {prepared.grid} with {prepared.codes:,} codes"
        raise ValueError(f"{data[0]} has {has}: expected {grid_of(model)}, as the model was trained on")
    rows, how = prepared.split(split), Given(counts=counts)
    rows.classes = model.config.classes or rows.classes
    if steps is not None:
        how["steps"] = numbers("steps", steps, int, "32")[0]
    found: dict[str, Any] = {}
    for name, of in image_ways(model, rows, samples=samples, **how).items():
        with show.bar(name, min(sequences, len(rows))) as advance:
            found[name] = of(sequences=sequences, batch=batch, seed=seed, on_batch=advance)
    if not PartialState().is_main_process:
        return
    if as_json:
        print(json_text({name: one.as_dict() for name, one in found.items()}))
        return
    image_likelihoods(found)


def look(
    pictures: sets.Real, network: inception.Features, size: int, channels: int, keep: Path | None = None
) -> SeenImages:
    """What the network sees in real pictures, with a bar; `keep`: a file for their statistics."""
    with show.bar(f"looking at {Path(pictures.name).name}", pictures.count) as advance:
        seen = pictures.seen(network, size, channels=channels, on_batch=advance)
    if keep is not None and PartialState().is_main_process:
        seen.statistics.save(keep)
    return seen


def find_features(features: str | None = None, feature_input: str | None = None) -> inception.Features:
    """The network whose features are compared, by its name or file."""
    name = features or inception.TORCH_FIDELITY
    with show.waiting(f"loading {name}"):
        return inception.features(name, input=feature_input, device=processes().device)
