"""How to sample: every choice, once. The library, the command line, the server and the page take them from here.

None means: the default of the model, which its folder may name (`with_defaults`), or else what suits it (decide.py).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict, TypeVar

from maskless.seeds import seed_of

TEXT_ORDERS = ("random", "left", "strands", "confidence")
IMAGE_ORDERS = ("halton", "confidence", "random", "raster", "regions")
COUNTS = ("uniform", "mdlm", "arccos", "arccos-after-one", "cosine")
SCHEDULES = ("constant", "ramp", "cosine", "interval")
KINDS = (  # of choices that belong together: where to write, how to draw, towards what
    ("order", "steps", "strands", "regions", "counts", "exact", "draft", "revise"),
    ("temperature", "top_k", "top_p"),
    ("guidance", "schedule"),
)
Function = TypeVar("Function", bound=Callable[..., Any])


def choice(
    default: Any, help: str, *, least: float | None = None, zero: str = "", unit: str = "", of: tuple[str, ...] = ()
) -> Any:
    """A field with what is said about it: help, the least value, what 0 means and what is counted; or known names."""
    meaning = f" ({zero})" if zero else ""
    range = "" if least is None else f"{least}{meaning} or more {unit}".rstrip()
    return field(default=default, metadata={"help": help, "least": least, "range": range, "of": of})


def check_name(what: str, name: object, known: Collection[str]) -> None:
    """Raise a ValueError about a name that is not known; it lists those that are."""
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}: expected one of {', '.join(known)}")


def check_positive(**numbers: int) -> None:
    """Raise a ValueError about the first of these numbers that is less than 1."""
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name} {value} is out of range: expected 1 or more")


@dataclass(frozen=True, kw_only=True)
class How:
    """How to sample; `generate` and `fill` take these as keywords."""

    steps: int | None = choice(None, "Sampling steps, at most one per unknown token. Default: as suits the model.")
    seed: int = choice(0, "The same seed gives the same samples.")
    temperature: float | None = choice(
        None, "Sampling temperature; 0: always the most likely token. Default: 1.", least=0, zero="greedy"
    )
    top_k: int | None = choice(None, "Sample among the k most likely tokens.", least=1)
    top_p: float | None = choice(None, "Top-p (nucleus) threshold.")
    order: str | None = choice(
        None,
        "Text: random, left, strands or confidence; images: halton, confidence, random, raster or regions. "
        "Default: as the model was trained.",
    )
    strands: int | None = choice(None, "Parts of a text written in parallel; replaces order and steps.", least=1)
    regions: int | None = choice(None, "Images: R x R parts drawn in parallel, each row by row.", least=1)
    counts: str | None = choice(None, "How many tokens each step samples. Default: uniform; images: arccos.", of=COUNTS)
    guidance: float | None = choice(None, "Guidance scale. Default: 0 (none).", least=0, zero="none")
    schedule: str = choice("ramp", "Guidance schedule.", of=SCHEDULES)
    noise: float | None = choice(
        None, "Confidence order: initial randomness. Default: 0; images: 5.", least=0, zero="none"
    )
    warmup: int | None = choice(
        None, "Initial steps at temperature 2. Default: 0; images: 1.", least=0, zero="none", unit="steps"
    )
    refresh: int = choice(1, "Full context: re-encode the known tokens only every r-th step (approximate).", least=1)
    exact: bool = choice(False, "Sample several tokens per round, with exactly the distribution of one token per step.")
    draft: int | None = choice(None, "Exact: tokens per draft. Default: 16, or the number of strands.", least=1)
    revise: int = choice(
        0, "Revision rounds: the least likely tokens are resampled.", least=0, zero="none", unit="rounds"
    )

    def __post_init__(self) -> None:
        for name, about in self.__dataclass_fields__.items():
            value, least, of = getattr(self, name), about.metadata["least"], about.metadata["of"]
            if value is not None and of:
                check_name(name, value, of)
            if value is not None and least is not None and not least <= value < math.inf:
                raise ValueError(f"{name} {value} is out of range: expected {about.metadata['range']}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} is out of range: expected more than 0 and at most 1")
        if self.strands is not None and (
            self.order not in (None, "strands") or self.steps is not None or self.counts not in (None, "uniform")
        ):
            raise ValueError(f"strands {self.strands} replace order, steps and counts: expected none of them as well")
        if self.regions is not None and self.order not in (None, "regions"):
            raise ValueError(f"regions {self.regions} with order {self.order!r}: expected the order regions, or none")
        if self.draft is not None and not self.exact:
            raise ValueError(f"draft {self.draft} goes with exact=True: expected both, or none")
        if self.exact and (self.steps is not None or self.counts not in (None, "uniform")):
            raise ValueError("exact sampling sets steps and counts itself: expected neither of them")
        if self.exact and (self.order == "confidence" or self.revise or self.refresh > 1):
            what = "order confidence" if self.order == "confidence" else "revise" if self.revise else "refresh"
            raise ValueError(f"{what} does not go with exact sampling: expected one of the two")
        object.__setattr__(self, "seed", seed_of(self.seed))

    def with_defaults(self, of_model: Mapping[str, Any], unknown: int) -> How:
        """The same with a model's own defaults for those kinds of choices of which nothing was said.

        Whoever says anything about the draw, such as temperature=1, gets what they said and no more. There are at most
        as many steps as unknown tokens. A second time nothing changes.
        """
        plain, found = How(), dict[str, Any]()
        for kind in KINDS:
            if all(getattr(self, name) == getattr(plain, name) for name in kind):
                found |= {name: of_model[name] for name in kind if name in of_model}
        if "steps" in found:
            found["steps"] = min(found["steps"], unknown)
        how = replace(self, **found)
        temperature = 1.0 if how.temperature is None else how.temperature
        return replace(how, temperature=temperature, guidance=how.guidance or 0.0)


def check_defaults(given: Any) -> dict[str, Any]:
    """Defaults of a model; a ValueError about any that cannot be."""
    known = [name for kind in KINDS for name in kind]
    if not isinstance(given, dict) or not set(given) <= {*known}:
        raise ValueError(f"defaults {given!r}: expected some of {', '.join(known)}")
    How(**given)
    return given


class Choices(TypedDict, total=False):
    """The same as keywords, for `**how: Unpack[Choices]`: what an editor offers, and a type checker checks."""

    steps: int | None
    seed: Any  # None: another one each time
    temperature: float | None
    top_k: int | None
    top_p: float | None
    order: str | None
    strands: int | None
    regions: int | None
    counts: str | None
    guidance: float | None
    schedule: str
    noise: float | None
    warmup: int | None
    refresh: int
    exact: bool
    draft: int | None
    revise: int


def spelled_out(function: Function) -> Function:
    """The function with each choice in its signature, where it has `**how`: for `help()` and for notebooks."""
    found = inspect.signature(function)
    own = [one for one in found.parameters.values() if one.kind is not one.VAR_KEYWORD]
    choices = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=about.default, annotation=about.type)
        for name, about in How.__dataclass_fields__.items()
    ]
    function.__signature__ = found.replace(parameters=[*own, *choices])  # type: ignore[attr-defined]
    return function
