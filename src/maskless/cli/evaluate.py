"""The commands `evaluate` and `fid`: how good a model of text or of pictures is, and how alike two sets of pictures."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from maskless.cli import evaluate_tables as tables
from maskless.cli import show
from maskless.cli.evaluate_text import Asked, check_files, evaluate_text, whole_numbers
from maskless.cli.generate import JSON, MODEL, TOKENIZER, refuse
from maskless.files import json_text

if TYPE_CHECKING:
    from maskless.checkpoint import Model
    from maskless.evaluate.images import SeenImages
    from maskless.evaluate.inception import Features
    from maskless.evaluate.sets import Real
    from maskless.evaluate.sweep import ImagePoint

FEATURES = Annotated[
    str | None, typer.Option(help="Pictures: the file of a feature network, or torch-fidelity (default).")
]
FEATURE_INPUT = Annotated[
    str | None, typer.Option(help="Pictures: what an unknown TorchScript network takes, inception or pixels.")
]
VALID = Annotated[
    float | None,
    typer.Option(help="Pictures: the share held out by `prepare`, for PATH:train and PATH:valid. Default: 0.05."),
]
STATISTICS = Annotated[
    Path | None, typer.Option("--save-statistics", help="Pictures: keep the statistics of the real ones in this .npz.")
]


def evaluate(
    model: MODEL,
    what: Annotated[
        str | None,
        typer.Option(
            help="Text: bound (default), genppl, orders, leak, variance, or several with commas. Pictures: leak."
        ),
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option(help="Text: a prepared folder with the model's vocabulary, or a text file.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Text: valid (default) or train.")] = None,
    sequences: Annotated[int | None, typer.Option(help="Text: at most so many, evenly spread. Default: 2,048.")] = None,
    samples: Annotated[
        int | None, typer.Option(help="Text: random splits of a sequence (8). Pictures: how many are drawn (50,000).")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="At once. Text: 32. Pictures: 500 on CUDA, else 25.")] = None,
    seed: int = 0,
    judge: Annotated[
        str | None, typer.Option(help="Text, genppl: a causal LM: hub id, folder or .gguf. Default: GPT-2 Large.")
    ] = None,
    texts: Annotated[int | None, typer.Option(help="Text, genppl: how many are drawn (1,024).")] = None,
    save_texts: Annotated[bool, typer.Option("--save-texts", help="Text, genppl: keep the texts in --out.")] = False,
    length: Annotated[int | None, typer.Option(help="Text, genppl: tokens of a text. Default: the context.")] = None,
    pairs: Annotated[int | None, typer.Option(help="Text, variance: pairs of gradients (16).")] = None,
    tokenizer: TOKENIZER = None,
    reference: Annotated[
        str | None, typer.Option(help="Pictures: real ones, PATH or PATH:train or PATH:valid, or their statistics.")
    ] = None,
    valid: VALID = None,
    features: FEATURES = None,
    feature_input: FEATURE_INPUT = None,
    save_statistics: STATISTICS = None,
    steps: Annotated[str | None, typer.Option(help="Default 32. Text, genppl: several with commas, 8,16,32.")] = None,
    order: Annotated[
        str | None,
        typer.Option(
            help="Text, genppl: random (default), left-to-right, confidence. Pictures: halton (default), "
            "confidence, random, raster."
        ),
    ] = None,
    counts: Annotated[
        str | None,
        typer.Option(
            help="Tokens per step. Text: uniform (default), mdlm. Pictures: arccos (default), "
            "arccos-after-one (released with confidence)."
        ),
    ] = None,
    guidance: Annotated[str | None, typer.Option(help="Pictures: a weight, or several: 0,1,2,3. Default: 0.")] = None,
    schedule: Annotated[str | None, typer.Option(help="Pictures: of the guidance, ramp (default) or constant.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Default 1.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Text, genppl: draw among the k most likely tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Text, genppl: draw from the nucleus.")] = None,
    revise: Annotated[
        int | None, typer.Option(help="Text, genppl: rounds that decide the least likely tokens again.")
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option("--out", help="A .json of the figures (text: of genppl); pictures: a .png of several beside."),
    ] = None,
    as_json: JSON = False,
) -> None:
    """Measure a model. Text: the validation bound, our estimator and the paper's, with standard errors.

    maskless evaluate runs/my --data runs/my/data

    Generative perplexity with variety and speed; orders; a leak probe; the variance of gradients (docs/evaluation.md):

    maskless evaluate runs/my --what genppl --judge judge/ --steps 8,16,32,64 --top-p 0.9 --out genppl.json

    Pictures: FID, Inception Score, precision and recall against real ones. What is in --out is not computed again.

    maskless evaluate runs/photos --reference photos --guidance 0,1,2,3 --features inception.pt --out quality.json
    """
    from maskless import api
    from maskless.seeds import check_seed
    from maskless.train.processes import processes

    check_seed(seed)
    loaded = api.load(model, device=processes().device, tokenizer=tokenizer)
    of_both: dict[str, Any] = {"steps": steps, "order": order, "counts": counts, "temperature": temperature, "out": to}
    of_text: dict[str, Any] = {"data": data, "split": split, "sequences": sequences, "what": what, "judge": judge}
    of_text |= {"texts": texts, "save-texts": save_texts, "length": length, "pairs": pairs}
    of_text |= {"top-k": top_k, "top-p": top_p, "revise": revise, "tokenizer": tokenizer}
    of_pictures: dict[str, Any] = {"reference": reference, "features": features, "feature-input": feature_input}
    of_pictures |= {"save-statistics": save_statistics, "guidance": guidance, "schedule": schedule, "valid": valid}
    given = of_both | of_text | {"samples": samples, "batch": batch}
    if loaded.layout != "image":
        refuse(of_pictures, "pictures", "text")
        evaluate_text(model, loaded, Asked(seed=seed, as_json=as_json, given=given))
        return
    if what == "leak":
        for name, value in (given | of_pictures).items():
            if value not in (None, False) and name not in ("what", "sequences"):
                raise ValueError(f"--{name} does not go with --what leak: pictures are probed on random codes")
        _leak(loaded, 4 if sequences is None else sequences, seed, as_json)
        return
    if what is not None:
        raise ValueError(f"--what {what}: expected leak or nothing, since this is a model of pictures")
    refuse(of_text, "text", "pictures, which are compared with --reference")
    if reference is None or to is None:
        raise ValueError("this is a model of pictures: expected --reference PATH (real ones) and --out FILE.json")
    how = {"order": order, "counts": counts, "schedule": schedule, "temperature": temperature}
    numbers = [] if steps is None else whole_numbers("steps", steps)
    if len(numbers) > 1:
        raise ValueError(f"--steps {steps}: expected one number for pictures; what may be a list is --guidance")
    how |= {"steps": numbers[0]} if numbers else {}
    chosen = {name: value for name, value in how.items() if value is not None} | {"seed": seed}
    drawn: dict[str, Any] = {
        "samples": 50_000 if samples is None else samples,
        "batch": batch,
        "guidances": _weights(guidance or "0"),
    }
    _evaluate_pictures(
        loaded,
        reference,
        _features(features, feature_input),
        save_statistics,
        to,
        as_json,
        valid=valid,
        **drawn,
        how=chosen,
    )


def _leak(model: Model, sequences: int, seed: int, as_json: bool) -> None:
    """Probe a model of pictures, on random codes behind a BOS and with its classes in turn."""
    import torch
    from accelerate import PartialState

    from maskless.evaluate.leak import leak
    from maskless.evaluate.likelihood import check_positive
    from maskless.images import class_ids, codec_of
    from maskless.objective import pgm_arccos

    check_positive(sequences=sequences)
    codes, generator = codec_of(model).codes, torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, codes, (sequences, model.config.length), generator=generator)
    tokens[:, 0] = codes + 1  # BOS, after the codes and the mask
    labels = None if model.config.classes is None else class_ids(model, None, sequences)
    found = leak(model.network, tokens, vocab=codes, objective=pgm_arccos, labels=labels, seed=seed)
    if not PartialState().is_main_process:
        return
    if as_json:
        print(json_text({"leak": found.as_dict()}))
    else:
        tables.leak(found)


def _evaluate_pictures(
    model: Model,
    reference: str,
    network: Features,
    statistics: Path | None,
    to: Path,
    as_json: bool,
    *,
    valid: float | None,
    samples: int,
    batch: int | None,
    guidances: list[float],
    how: dict[str, Any],
) -> None:
    """Figures of what a model draws, with each guidance; a process draws its share, the main one shows them."""
    from accelerate import PartialState

    from maskless.checkpoint import digest
    from maskless.decide import settled
    from maskless.evaluate import sets
    from maskless.evaluate.sweep import sweep
    from maskless.how import How
    from maskless.images import codec_of, grid_of

    sets.check_drawing(model, guidances, **how)
    check_files(to, statistics)
    at_once = (500 if model.device.type == "cuda" else 25) if batch is None else batch  # 50,000 in equal parts
    sample = sets.drawn(model, samples, at_once, **how)
    (h, w), codec = grid_of(model), codec_of(model)
    if h != w:
        raise ValueError(f"this model draws {w} x {h} cells: expected one of squares")
    pictures = sets.real(reference, valid)
    sets.check_share(valid, pictures)
    seen = _look(pictures, network, h * codec.factor, codec.channels, statistics)
    settings = dataclasses.asdict(settled(model, How(**how), h * w)) | {
        "model": digest(model.network, codec),
        "samples": samples,
    }
    del settings["guidance"]  # which each point has
    swept = partial(sweep, sample, guidances, network, seen, to, score=network.classes > 0, settings=settings)
    points = show.sweeping(swept, len(guidances), samples, lambda point: f"w = {point.guidance:g}")
    if PartialState().is_main_process:
        _show_points(points, to, as_json)


def _show_points(points: list[ImagePoint], to: Path, as_json: bool) -> None:
    """Figures on stdout, and a curve beside their file where there are several."""
    from maskless.evaluate.sweep import plot, table

    curve = to.with_suffix(".png")
    if len(points) > 1:
        plot({to.stem: points}, curve)
    if as_json:
        print(to.read_text())
        return
    print(table(points))
    show.err.print(
        f"figures: {to}" + (f"   curve: {curve}" if len(points) > 1 else ""),
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def fid(
    real: Annotated[str, typer.Argument(help="PATH, PATH:train, PATH:valid, hf:NAME:SPLIT, or statistics (.npz).")],
    made: Annotated[str, typer.Argument(help="The pictures to judge, in the same way.")],
    valid: VALID = None,
    features: FEATURES = None,
    feature_input: FEATURE_INPUT = None,
    size: Annotated[
        int | None, typer.Option(help="Cut to squares of so many pixels. Default: as the first is.")
    ] = None,
    save_statistics: STATISTICS = None,
    as_json: JSON = False,
) -> None:
    """Compare two sets of pictures: FID, precision and recall, the Inception Score of the second; no model is needed.

    maskless fid cifar-10-batches-bin:train cifar-10-batches-bin:valid --features inception.pt
    """
    from accelerate import PartialState

    from maskless.evaluate import sets
    from maskless.evaluate.images import quality
    from maskless.train.processes import processes

    processes()
    check_files(save_statistics)
    network, both = _features(features, feature_input), [sets.real(real, valid), sets.real(made, valid)]
    sets.check_share(valid, *both)
    side = size or next((one.images.side() for one in both if one.images is not None), 0)
    first = _look(both[0], network, side, 3, save_statistics)
    found = quality(_look(both[1], network, side, 3), first, network)
    if not PartialState().is_main_process:
        return
    if as_json:
        print(json_text(found.as_dict()))
        return
    show.qualities(found)


def _look(pictures: Real, network: Features, size: int, channels: int, keep: Path | None = None) -> SeenImages:
    """What the network sees in real pictures, with a bar; `keep`: a file for their statistics."""
    from accelerate import PartialState

    main = PartialState().is_main_process
    with show.bar(f"looking at {Path(pictures.name).name}", pictures.count, shown=main) as advance:
        seen = pictures.seen(network, size, channels=channels, on_batch=advance)
    if keep is not None and main:
        seen.statistics.save(keep)
    return seen


def _features(name: str | None, input: str | None) -> Features:
    from maskless.evaluate.inception import TORCH_FIDELITY, features
    from maskless.train.processes import processes

    return features(name or TORCH_FIDELITY, input=input, device=processes().device)


def _weights(given: str) -> list[float]:
    """A number, or several with commas between."""
    try:
        return [float(number) for number in given.split(",")]
    except ValueError:
        raise ValueError(f"--guidance {given!r}: expected a number, or several: 0,1,2,3") from None
