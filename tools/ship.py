"""A training run as a shipped model: averaged weights in half precision, with a card that holds the run's figures.

    python tools/ship.py runs/stories stories --about "Writes little stories." --data "Stories sampled from ..."

The modulations of a model of text are constants, and those of pictures as many as classes. So the condition that makes
them is written down as such: the same function with a fifth fewer parameters. A card that is there already keeps its
words, and only its table of the run is new.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from maskless import api, shipped
from maskless.checkpoint import NETWORKS, Model, digest
from maskless.files import put_folder, write_aside
from maskless.how import check_defaults
from maskless.nn.blocks import ClassCondition, ConstantCondition, Modulation, linear_row
from maskless.problems import dense
from maskless.train.report import read_metrics

LIMIT = 24.0  # MiB
BEGIN, END = "<!-- run -->", "<!-- end of run -->"
NAME = re.compile(r"[a-z0-9][a-z0-9-]*")
TEMPLATE = """# {name}

{about}

```python
import maskless

model = maskless.load("{name}")
```

## Data and licence
{data}

## Training
{run}

## Limits
{limits}
"""


@torch.no_grad()
def condensed(model: Model) -> Model:
    """The same function with a smaller condition: a constant goes into the biases, each class has an entry."""
    network = model.network
    condition = getattr(network, "condition", None)
    if isinstance(condition, ConstantCondition):
        width, rows = 1, torch.zeros(1, model.config.condition)
    elif isinstance(condition, ClassCondition) and len(condition.weight) < model.config.condition:
        width, rows = len(condition.weight), condition.weight
    else:
        return model
    smaller: nn.Module = NETWORKS[model.kind][1](dataclasses.replace(model.config, condition=width))
    state = {name: value for name, value in network.state_dict().items() if not name.startswith("condition.")}
    for name, module in network.named_modules():
        if isinstance(module, Modulation):
            state[f"{name}.linear.weight"] = module.linear.weight @ rows.T
            if isinstance(condition, ConstantCondition):
                state[f"{name}.linear.bias"] = linear_row(condition(), module.linear)[0]
    if isinstance(condition, ClassCondition):
        state["condition.weight"] = torch.eye(width)
    state |= {name: torch.zeros_like(value) for name, value in smaller.state_dict().items() if name not in state}
    smaller.load_state_dict(state)
    return Model(smaller, model.codec, model.layout, model.classes, model.mixture, model.defaults, model.quality).eval()


def borrow(folder: Path, name: str) -> None:
    """Leave the tokenizer out where another shipped model has the same, and name that one."""
    mine = folder / "tokenizer.json"
    for other in shipped.names():
        theirs = shipped.FOLDER / other / "tokenizer.json"
        if other != name and mine.is_file() and theirs.is_file() and theirs.read_bytes() == mine.read_bytes():
            mine.unlink()
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | {"tokenizer": other}, indent=2) + "\n")


def halve(file: Path) -> None:
    """Put a file of weights in half precision; what is no float, or too large for one, stays as it is."""

    def halved(x: Tensor) -> Tensor:
        fits = x.is_floating_point() and bool((x.abs() < 65_504).all())
        return x.half() if fits else x

    state = {name: halved(value) for name, value in load_file(file).items()}
    write_aside(file, lambda path: save_file(state, path, {"format": "pt"}))


@torch.no_grad()
def difference(model: Model, other: Model) -> float:
    """The largest difference of two models' log-probabilities on a text of random tokens, half of it known."""
    generator = torch.Generator().manual_seed(0)
    known = min(model.config.length // 2, 64)
    tokens = torch.randint(0, 100, (2, known), generator=generator).clamp(max=model.config.vocab - 2)
    places = torch.arange(known).expand(2, known)
    problems = dense(tokens, places, torch.full((2, 1), known), None, None)
    before, after = (each.network(problems).float().log_softmax(-1) for each in (model, other))
    return float((before - after)[before > -20].abs().max())


def figures(run: Path) -> dict[str, Any]:
    """What a run's folder says about it: settings, and the last of what was measured."""
    try:
        config = json.loads((run / "run.json").read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError) as error:
        raise ValueError(f"{run} is not a run: {error}") from None
    train, network = config["train"], config["network"]
    last = {key: value for line in read_metrics(run / "metrics.jsonl") for key, value in line.items()}
    if not {"perplexity", "error", "seconds"} <= last.keys():
        raise ValueError(f"{run} is not a finished run: nothing was measured")
    steps, batch, length = last["step"], train["batch"], network["length"]
    found = {
        "steps": f"{steps:,} of {batch} sequences of {length} tokens, {steps * batch * length / 1e6:,.0f} M tokens",
        "minutes": f"{last['seconds'] / 60:.1f}",
        "learning rate": f"{train['learning_rate']:g}, {train['decay']}, warm-up of {train['warmup']} steps",
        "averaged weights": f"decay {train['ema']:g}",
        "seed": train["seed"],
        "validation perplexity (bound)": f"{last['perplexity']:.3f} ± {last['perplexity'] * last['error']:.3f}",
    }
    if distill := config.get("distill"):
        taught = distill["teacher_steps"] / distill["ratio"] ** config["number"]
        found["distilled"] = f"round {config['number']}: {taught:g} sampling steps for {distill['teacher_steps']}"
    if orders := train.get("orders"):
        found["orders"] = orders
    for name in ("width", "heads", "encoder", "decoder", "layers", "context", "dropout"):
        if name in network:
            found[name] = network[name]
    return found


def table(rows: dict[str, Any]) -> str:
    lines = ["| of the run | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]
    return "\n".join([BEGIN, *lines, END])


def written_card(old: str | None, name: str, rows: dict[str, Any], words: dict[str, str]) -> str:
    """A new card, or the old one with the table of a new run."""
    if old is None:
        return TEMPLATE.format(name=name, run=table(rows), **words)
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the card of {name} has no place for the run: expected {BEGIN} and {END} in it")
    return before + table(rows) + after


def ship(
    run: Path,
    name: str,
    *,
    words: dict[str, str],
    limit: float = LIMIT,
    defaults: dict[str, Any] | None = None,
    quality: str | None = None,
) -> shipped.Shipped:
    """Put the model of a run among the shipped ones; a smaller copy of an older one stands there until it is whole."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name for a model: expected small letters, digits and hyphens")
    rows = figures(run)
    target = shipped.FOLDER / name
    old = (target / shipped.CARD).read_text(encoding="utf-8") if (target / shipped.CARD).is_file() else None
    aside = shipped.FOLDER / f".{name}.part"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        model = api.load(run, device="cpu")
        model.defaults, model.quality = check_defaults(defaults or {}), quality
        condensed(model).save_pretrained(aside)
        (aside / "README.md").unlink()  # a shipped model has a card of its own
        for file in aside.rglob("*.safetensors"):
            halve(file)
        borrow(aside, name)
        again = Model.from_pretrained(aside)
        rows["parameters"] = f"{sum(p.numel() for p in again.network.parameters()):,}"
        rows["log-probabilities in half precision differ by at most"] = f"{difference(model, again):.4f}"
        rows["sha256 of the weights"] = digest(again.network)
        (aside / shipped.CARD).write_text(written_card(old, name, rows, words), encoding="utf-8")
        size = sum(path.stat().st_size for path in aside.rglob("*") if path.is_file()) / 2**20
        if size > limit:
            raise ValueError(f"{name} has {size:.1f} MiB: expected at most {limit:g}")
        put_folder(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return shipped.describe(name)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Turn a training run into a shipped model.")
    parser.add_argument("run", type=Path)
    parser.add_argument("name")
    parser.add_argument("--about", default="A model of text.", help="one sentence; of a new card")
    parser.add_argument("--data", default="Not said.", help="what it was trained on, and the licence; of a new card")
    parser.add_argument("--limits", default="Not measured.", help="what it cannot do; of a new card")
    parser.add_argument("--limit", type=float, default=LIMIT, help="MiB that it may have")
    parser.add_argument("--defaults", type=json.loads, help='choices that suit the model, as JSON: {"top_p": 0.9}')
    parser.add_argument("--quality", help='how good its samples are with them, in a few words: "Gen-PPL 4.6"')
    given = parser.parse_args(arguments)
    words = {"about": given.about, "data": given.data, "limits": given.limits}
    try:
        made = ship(
            given.run, given.name, words=words, limit=given.limit, defaults=given.defaults, quality=given.quality
        )
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    print(f"{shipped.FOLDER / made.name}: {made.kind}, {made.parameters:,} parameters, {made.bytes / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
