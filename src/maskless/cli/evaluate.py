"""The commands `evaluate` and `fid`: how good a text or image model is, and how alike two sets of pictures."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from maskless.cli import show
from maskless.cli.checks import check_places, flag, refuse
from maskless.cli.generate import HOW
from maskless.cli.options import DEVICE, JSON, MODEL, TOKENIZER, Given, Option, Options, with_tables
from maskless.files import json_text

FEATURES: Options = {
    "features": Option(str, "Pictures: the file of a feature network, or torch-fidelity (default)."),
    "feature_input": Option(str, "Pictures: what an unknown TorchScript network takes, inception or pixels."),
}
REAL: Options = {
    "valid": Option(float, "Pictures: the share held out by `prepare`, for PATH:train and PATH:valid. Default: 0.05."),
    "save_statistics": Option(Path, "Pictures: keep the statistics of the real ones in this .npz."),
}
TEXT: Options = {
    "what": Option(
        str,
        "Text: bound (default), genppl, orders, parallel, leak, variance, or several with commas. "
        "Pictures: bound (by order, of --data) or leak.",
    ),
    "data": Option(list[str], "A prepared folder with the model's vocabulary; for text also a text file."),
    "split": Option(str, "Split of --data: valid (default) or train."),
    "sequences": Option(int, "At most so many sequences, evenly spread. Default: 2,048."),
    "judge": Option(str, "Text, genppl: a causal LM: hub id, folder or .gguf. Default: GPT-2 Large."),
    "texts": Option(int, "Text, genppl: how many are drawn (1,024)."),
    "save_texts": Option(bool, "Text, genppl: keep the texts in --out.", "--save-texts"),
    "length": Option(int, "Text, genppl: tokens of a text. Default: the context."),
    "exact": Option(bool, f"Text, genppl. {HOW['exact'].help}", "--exact"),
    "draft": Option(
        str, "Text, parallel: tokens drawn at once, several with commas. Default: 4,8,16. genppl: of --exact."
    ),
    "pairs": Option(int, "Text, variance: pairs of gradients (16)."),
    "revise": Option(HOW["revise"].type, f"Text, genppl. {HOW['revise'].help}"),
}
BOTH: Options = {
    "samples": Option(int, "Text: random splits of a sequence (8). Pictures: how many are drawn (50,000)."),
    "batch": Option(int, "Batch size. Text: 32. Pictures: 500 on CUDA, else 25."),
    "steps": Option(str, "Default 32. Text, genppl: several with commas, 8,16,32."),
    "order": Option(
        str,
        "Text, genppl: random, left, strands or confidence. Default: as the model was trained. "
        "Pictures: halton, confidence, random, raster or regions.",
    ),
    "counts": Option(
        str,
        "Tokens per step. Text: uniform (default), mdlm. Pictures: arccos (default), "
        "arccos-after-one (released with confidence), cosine, uniform (of regions).",
    ),
    **{name: HOW[name] for name in ("temperature", "top_k", "top_p")},
    "out": Option(Path, "A .json of the figures (text: of genppl); pictures: a .png of several beside."),
}
PICTURES: Options = {
    "reference": Option(str, "Pictures: real ones, PATH or PATH:train or PATH:valid, or their statistics."),
    "guidance": Option(str, "Pictures: guidance scale, or several: 0,1,2,3. Default: 0."),
    **{name: HOW[name] for name in ("schedule", "regions", "noise", "warmup")},
}

OF_IMAGES = {  # what is measured of an image model without drawing: the options that go with it, and why no others
    "leak": (("sequences",), ": pictures are probed on random codes"),
    "bound": (("data", "split", "sequences", "samples", "batch", "steps", "counts"), " of an image model"),
}


@with_tables
def evaluate(
    *,
    model: MODEL,
    text: Annotated[Given, TEXT],
    both: Annotated[Given, BOTH],
    of_pictures: Annotated[Given, PICTURES],
    features: Annotated[Given, FEATURES],
    kept: Annotated[Given, REAL],
    seed: Annotated[int, typer.Option(help="The same seed gives the same figures.")] = 0,
    tokenizer: TOKENIZER = None,
    device: DEVICE = None,
    as_json: JSON = False,
) -> None:
    """Measure a model. Text: the validation bound, our estimator and the paper's, with standard errors.

    maskless evaluate runs/my --data runs/my/data

    Generative perplexity with variety and speed; orders; a leak probe; the variance of gradients (docs/evaluation.md):

    maskless evaluate runs/my --what genppl --judge judge/ --steps 8,16,32,64 --top-p 0.9 --out genppl.json

    Pictures: FID, Inception Score, precision and recall against real ones. What is in --out is not computed again.

    maskless evaluate runs/photos --reference photos --guidance 0,1,2,3 --features inception.pt --out quality.json
    """
    with show.waiting("starting"):
        from maskless.cli.evaluate_pictures import evaluate_bound, evaluate_pictures
        from maskless.cli.measures import measure
        from maskless.seeds import check_seed
        from maskless.train.processes import processes

    check_seed(seed)
    loaded = show.loading(model, device=processes().device, tokenizer=tokenizer)
    if loaded.layout != "image":
        refuse([*of_pictures, *features, *kept], "image")
        measure(model, loaded, seed, as_json, **both, **text)
        return
    what, own = text.pop("what", None), ["tokenizer"] * (tokenizer is not None)
    if what is None:
        refuse([*text, *own], "text")
        evaluate_pictures(loaded, features, kept, as_json, seed=seed, **both, **of_pictures)
        return
    if what not in OF_IMAGES:
        raise ValueError(f"--what {what}: expected bound, leak or nothing, since this is an image model")
    taken, why = OF_IMAGES[what]
    for name in (*both, *text, *own, *of_pictures, *features, *kept):
        if name not in taken:
            raise ValueError(f"{flag(name)} does not go with --what {what}{why}")
    if what == "leak":
        measure(model, loaded, seed, as_json, what=what, **text)
    else:
        evaluate_bound(loaded, as_json, seed=seed, **text, **both)


@with_tables
def fid(
    *,
    real: Annotated[str, typer.Argument(help="PATH, PATH:train, PATH:valid, hf:NAME:SPLIT, or statistics (.npz).")],
    made: Annotated[str, typer.Argument(help="The pictures to judge, in the same way.")],
    features: Annotated[Given, FEATURES],
    size: Annotated[
        int | None, typer.Option(help="Cut to squares of so many pixels. Default: as the first is.")
    ] = None,
    kept: Annotated[Given, REAL],
    device: DEVICE = None,
    as_json: JSON = False,
) -> None:
    """Compare two sets of pictures: FID, precision and recall, the Inception Score of the second; no model is needed.

    maskless fid cifar-10-batches-bin:train cifar-10-batches-bin:valid --features inception.pt
    """
    with show.waiting("starting"):
        from accelerate import PartialState

        from maskless.cli.evaluate_pictures import find_features, look
        from maskless.evaluate import sets
        from maskless.evaluate.images import quality
        from maskless.train.processes import processes

    processes()
    valid, statistics = kept.get("valid"), kept.get("save_statistics")
    check_places(statistics)
    network, both = find_features(**features), [sets.real(real, valid), sets.real(made, valid)]
    sets.check_share(valid, *both)
    side = size or next((one.images.side() for one in both if one.images is not None), 0)
    first = look(both[0], network, side, 3, statistics)
    second = look(both[1], network, side, 3)
    with show.waiting("comparing"):
        found = quality(second, first, network)
    if not PartialState().is_main_process:
        return
    if as_json:
        print(json_text(asdict(found)))
        return
    show.qualities(found)
