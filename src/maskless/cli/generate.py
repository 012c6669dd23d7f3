"""The commands `generate` and `fill`: texts to stdout, pictures to a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from maskless.cli import pictures, show
from maskless.terminal import say

MODEL = Annotated[str, typer.Argument(help="A run or model folder, a shipped model, a hub id, or a released file.")]
TOKENIZER = Annotated[str | None, typer.Option(help="gpt2, bert, bytes, or a file; for models that bring none.")]
JSON = Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout.")]
STEPS = Annotated[
    int | None, typer.Option(help="1 to the number of unknown tokens. Default: all in a chain model, else 32 or fewer.")
]
SEED = Annotated[int, typer.Option(help="The same seed gives the same sample.")]
TEMPERATURE = Annotated[float, typer.Option(help="0: always the most likely token.")]
TOP_K = Annotated[int | None, typer.Option(help="Draw among the k most likely tokens.")]
TOP_P = Annotated[float | None, typer.Option(help="Draw from the nucleus of this probability.")]
ORDER = Annotated[
    str | None,
    typer.Option(help="random, left, strands. Default: as trained. Pictures: halton (default), confidence, raster."),
]
STRANDS = Annotated[int | None, typer.Option(help="Text: parts that are written in step; steps = tokens / strands.")]
COUNTS = Annotated[
    str | None,
    typer.Option(help="Tokens per step: uniform (default), mdlm (its posterior); pictures: arccos (default)."),
]
GUIDANCE = Annotated[float | None, typer.Option(help="Pictures: its weight. Default: 0, none.")]
SCHEDULE = Annotated[str | None, typer.Option(help="Pictures: of the guidance, ramp (default) or constant.")]
WARMUP = Annotated[int | None, typer.Option(help="Pictures: first steps at half the sharpness. Default: 1.")]
NOISE = Annotated[float | None, typer.Option(help="Pictures, order confidence: chance in it at first. Default: 5.")]
REFRESH = Annotated[int, typer.Option(help="Full context: encode it anew in every r-th step only; faster, not exact.")]
REVISE = Annotated[int, typer.Option(help="Rounds that decide the least likely tokens again; better, not exact.")]
BATCH = 128  # texts that are drawn together, and printed before the next ones


def generate(
    model: MODEL,
    n: Annotated[int | None, typer.Option(help="How many. Default: 4, or one for each --label.")] = None,
    prompt: Annotated[str, typer.Option(help="What each text begins with.")] = "",
    length: Annotated[int | None, typer.Option(help="Tokens. Default: the model's context.")] = None,
    steps: STEPS = None,
    seed: SEED = 0,
    temperature: TEMPERATURE = 1.0,
    top_k: TOP_K = None,
    top_p: TOP_P = None,
    order: ORDER = None,
    strands: STRANDS = None,
    counts: COUNTS = None,
    refresh: REFRESH = 1,
    revise: REVISE = 0,
    tokenizer: TOKENIZER = None,
    as_json: JSON = False,
    label: Annotated[list[str] | None, typer.Option(help="Pictures: a class, by name or number; repeat it.")] = None,
    guidance: GUIDANCE = None,
    schedule: SCHEDULE = None,
    warmup: WARMUP = None,
    noise: NOISE = None,
    to: Annotated[
        Path | None, typer.Option("--out", help="Pictures: the PNG to write, or a folder for a PNG of each.")
    ] = None,
    gif: Annotated[Path | None, typer.Option(help="Pictures: a GIF of how they came.")] = None,
    heat: Annotated[Path | None, typer.Option(help="Pictures: a PNG of when each cell was decided.")] = None,
) -> None:
    """Write texts to stdout, or pictures to a file.

    maskless generate runs/my --n 4 --steps 32 --seed 0 --temperature 1 --top-p 0.9

    maskless generate runs/photos --label cat --label ship --guidance 6 --out pictures.png
    """
    from maskless import api

    loaded = api.load(model, tokenizer=tokenizer)
    how = _how(steps=steps, seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, order=order, counts=counts)
    of_text = {"prompt": prompt, "length": length, "refresh": refresh != 1, "revise": revise, "json": as_json}
    of_text["strands"] = strands is not None
    of_pictures = _how(guidance=guidance, schedule=schedule, warmup=warmup, noise=noise)
    n = 4 if n is None and not label else n
    if loaded.layout == "image":
        refuse(of_text, "text", "pictures")
        pictures.draw(loaded, to, gif, heat, label, n, **of_pictures, **how)
        return
    files = {"out": to, "gif": gif, "heat": heat}
    refuse({**files, "label": label, **dict.fromkeys(of_pictures, True)}, "pictures", "text")
    how |= {"prompt": prompt, "length": length, "refresh": refresh, "revise": revise} | _how(strands=strands)
    assert n is not None
    for first in range(0, max(1, n), BATCH):
        with show.watching("generating") as on_step:
            texts = api.generate(loaded, min(BATCH, n - first), first=first, batch=BATCH, on_step=on_step, **how)
        for number, one in enumerate(texts, first):
            if as_json:
                told = {"text": one, "tokens": one.tokens, "steps": one.steps, "order": one.order}
                print(json.dumps(told), flush=True)
            else:
                if n > 1:
                    show.err.rule(f"sample {number}", style="dim")
                say(one)


def fill(
    model: MODEL,
    what: Annotated[
        str,
        typer.Argument(help="Text with gaps of so many tokens: 'The \\[8] sat on \\[12].' Or the file of a picture."),
    ],
    steps: STEPS = None,
    seed: SEED = 0,
    temperature: TEMPERATURE = 1.0,
    top_k: TOP_K = None,
    top_p: TOP_P = None,
    order: ORDER = None,
    strands: STRANDS = None,
    counts: COUNTS = None,
    refresh: REFRESH = 1,
    revise: REVISE = 0,
    tokenizer: TOKENIZER = None,
    as_json: JSON = False,
    known: Annotated[Path | None, typer.Option(help="Pictures: a mask of the same size, white where it stays.")] = None,
    box: Annotated[
        str | None, typer.Option(help="Pictures: the pixels to draw anew instead, LEFT,TOP,RIGHT,BOTTOM.")
    ] = None,
    label: Annotated[str | None, typer.Option(help="Pictures: its class, by name or number.")] = None,
    guidance: GUIDANCE = None,
    schedule: SCHEDULE = None,
    warmup: WARMUP = None,
    noise: NOISE = None,
    to: Annotated[Path | None, typer.Option("--out", help="Pictures: the PNG to write.")] = None,
    compare: Annotated[Path | None, typer.Option(help="Pictures: a PNG of before, what was kept, and after.")] = None,
) -> None:
    """Fill the gaps of a text, any number of them, in any order, onto stdout; or draw a part of a picture anew.

    maskless fill runs/my "The \\[8] sat on \\[12]." --steps 16 --seed 0

    maskless fill runs/photos cat.png --box 16,0,48,32 --label cat --out new.png --compare both.png
    """
    from maskless import api

    loaded = api.load(model, tokenizer=tokenizer)
    how = _how(steps=steps, seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, order=order, counts=counts)
    of_pictures = _how(guidance=guidance, schedule=schedule, warmup=warmup, noise=noise)
    if loaded.layout == "image":
        of_text = {"refresh": refresh != 1, "revise": revise, "json": as_json, "strands": strands is not None}
        refuse(of_text, "text", "pictures")
        pictures.fill(loaded, Path(what), known, box, label, to, compare, **of_pictures, **how)
        return
    files = {"known": known, "out": to, "compare": compare}
    refuse({**files, "box": box, "label": label, **dict.fromkeys(of_pictures, True)}, "pictures", "text")
    with show.watching("filling") as on_step:
        how |= {"refresh": refresh, "revise": revise} | _how(strands=strands)
        filled = api.fill(loaded, what, on_step=on_step, **how)
    if as_json:
        print(json.dumps({"text": filled, "tokens": filled.tokens, "steps": filled.steps, "order": filled.order}))
    else:
        say(filled)


def _how(**options: Any) -> dict[str, Any]:
    """The options that were given; the others are as `How` and `ImageHow` have them."""
    return {name: value for name, value in options.items() if value is not None}


def refuse(options: dict[str, Any], kind: str, model: str) -> None:
    """Raise a ValueError about an option that was given and does not concern this kind of model."""
    for name, value in options.items():
        if value:
            raise ValueError(f"--{name} is for models of {kind}: this is one of {model}")
