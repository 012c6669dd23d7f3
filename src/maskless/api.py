"""What a user calls: load a model, generate, fill gaps, score. Texts or images, as the model makes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

import torch

from maskless import official
from maskless.checkpoint import FILES, Model, check_model
from maskless.codec.text import codec
from maskless.decide import Sampled
from maskless.drafts import OnStep
from maskless.how import Choices, How, spelled_out
from maskless.images import Picture, fill_image, generate_images
from maskless.scores import log_likelihood
from maskless.texts import Text, fill_text, generate_texts

__all__ = ["How", "Picture", "Sampled", "Text", "fill", "generate", "load", "log_likelihood"]


def load(
    name: str | Path,
    *,
    weights: str = "ema",
    queries: str | None = None,
    tokenizer: str | Path | None = None,
    device: str | torch.device | None = None,
) -> Model:
    """A model from a model folder, a run folder, the name of a shipped model, a hub id, or a released checkpoint file.

    weights ("ema", "raw") and queries ("position", "mean", "logsumexp") concern released files; tokenizer names the
    tokenizer of a model that brings none ("gpt2", "bert", "bytes", a file).
    """
    path = Path(name)
    if device is not None:
        check_device(device)
    if path.name in FILES and (path.parent / "config.json").is_file():
        raise ValueError(f"{name} is a part of a model: give its folder, {path.parent}")
    if path.is_file():
        network = official.read(path, weights=weights, queries=queries)
        layout = "wrapped" if getattr(network.config, "classes", None) is None else "image"
        model = Model(network, layout=layout).eval()
    elif (path / "model" / "config.json").is_file():
        model = Model.from_pretrained(path / "model")
    else:
        model = Model.from_pretrained(name)
    if not path.is_file() and (weights != "ema" or queries is not None):
        raise ValueError(f"weights and queries are chosen for released files only: {name} is none")
    if tokenizer is not None:
        if model.codec is not None or model.layout == "image":
            raise ValueError(f"{name} brings its own codec: leave the tokenizer {tokenizer} out")
        model.codec = codec(str(tokenizer))
        if model.codec.vocab > model.config.vocab:
            raise ValueError(
                f"the tokenizer {tokenizer} has {model.codec.vocab} ids, the model {name} only {model.config.vocab}"
            )
    return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))


@spelled_out
def generate(
    model: Model,
    n: int | None = None,
    *,
    prompt: str | None = None,
    length: int | None = None,
    first: int | None = None,
    labels: Sequence[str | int] | str | int | None = None,
    batch: int | None = None,
    on_step: OnStep | None = None,
    **how: Unpack[Choices],
) -> list[Any]:
    """n texts, or from an image model one for each label.

    Texts: each begins with the prompt and is `length` tokens long (the model's context by default). Sample i of a seed
    is the same whatever n is; `first` begins at another sample, so that processes can share a seed (`shards`).
    batch: samples at once, which bounds the memory and changes nothing else. on_step: called after each step. The
    other keywords are those of `How`.
    """
    check_model(model)
    at_once = {} if batch is None else {"batch": batch}
    if model.layout == "image":
        _refuse("text", "an image model", prompt=prompt, length=length)
        return generate_images(model, labels, n, first=first or 0, on_step=on_step, **at_once, **how)
    _refuse("image", "a text model", labels=labels)
    return generate_texts(
        model,
        1 if n is None else n,
        prompt=prompt or "",
        length=length,
        first=first or 0,
        on_step=on_step,
        **at_once,
        **how,
    )


@spelled_out
def fill(
    model: Model,
    what: Any,
    *,
    n: int | None = None,
    known: Any = None,
    numbers: Any = None,
    label: str | int | None = None,
    on_step: OnStep | None = None,
    **how: Unpack[Choices],
) -> Any:
    """A text with its gaps filled, "The [8] sat on [12].", or n ways to do so; a list of texts; or token ids (B, L), of
    which known=, a mask, says what stays, and numbers (B,) which sample of the seed each is (`texts.fill_text`).

    Or an image of which known=, a mask of its pixels, says what stays; label= its class (`images.fill_image`).
    """
    check_model(model)
    if model.layout == "image":
        _refuse("text", "an image model", n=n, numbers=numbers)
        return fill_image(model, what, known, label, on_step=on_step, **how)
    _refuse("image", "a text model", label=label)
    return fill_text(model, what, n=n, known=known, numbers=numbers, on_step=on_step, **how)


def _refuse(kind: str, model: str, **given: Any) -> None:
    """Raise a ValueError about a keyword that does not concern this kind of model."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name}= is for {kind} models: this is {model}")


def check_device(device: str | torch.device) -> None:
    """Raise a ValueError about a device that is not here."""
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError, TypeError):  # a torch without CUDA asserts
        count = torch.cuda.device_count()
        gpus = f"cuda, or cuda:0 to cuda:{count - 1}" if count else "there is no CUDA device here"
        raise ValueError(f"device {str(device)!r} cannot be used: expected cpu; {gpus}") from None
