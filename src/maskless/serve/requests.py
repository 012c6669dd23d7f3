"""What may stand in a request: fields, their ranges, and examples. Anything else is refused."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from maskless.how import How

SAYS = {one.name: one.metadata["help"] for one in fields(How)}
Name = Annotated[
    str | None, Field(max_length=200, description="One of GET /v1/models. Default: the first suitable one.")
]
Id = Annotated[int, Field(ge=0, lt=1 << 31)]
Ids = Annotated[list[Id], Field(max_length=1 << 16, fail_fast=True)]
Tokens = Annotated[list[Id | None], Field(fail_fast=True)]  # the first mistake is enough: to name all takes seconds
Text = Annotated[str, Field(max_length=1 << 18)]
Item = TypeVar("Item")
Several = Annotated[list[Item], Field(max_length=1024, fail_fast=True)]


class StrictBody(BaseModel):
    """No field beyond those named, and no number where a text is due."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: Name = None

    @model_validator(mode="before")
    @classmethod
    def _few(cls, given: Any) -> Any:
        if isinstance(given, dict) and len(given) > 2 * len(cls.model_fields):  # each unknown one would be a mistake
            raise ValueError(f"{len(given):,} fields: expected some of {', '.join(cls.model_fields)}")
        return given


def _number(name: str, least: float, most: float) -> Any:
    return Field(ge=least, le=most, allow_inf_nan=False, description=SAYS[name])


def _whole(name: str, least: int, most: int = 1 << 20) -> Any:
    return Field(ge=least, le=most, description=SAYS[name])


class Sampling(StrictBody):
    """How to sample: every field of `maskless.How`, with what a server allows."""

    steps: Annotated[int | None, _whole("steps", 1)] = None
    seed: Annotated[int | None, _whole("seed", 0, (1 << 63) - 1)] = 0
    temperature: Annotated[float | None, _number("temperature", 0, 100)] = None
    top_k: Annotated[int | None, _whole("top_k", 1, 1 << 31)] = None
    top_p: Annotated[float | None, _number("top_p", 1e-6, 1)] = None
    order: Annotated[
        Literal["random", "left", "strands", "confidence", "halton", "raster", "regions"] | None,
        Field(description=SAYS["order"]),
    ] = None
    strands: Annotated[int | None, _whole("strands", 1)] = None
    regions: Annotated[int | None, _whole("regions", 1)] = None
    counts: Annotated[
        Literal["uniform", "mdlm", "arccos", "arccos-after-one", "cosine"] | None, Field(description=SAYS["counts"])
    ] = None
    guidance: Annotated[float | None, _number("guidance", 0, 100)] = None
    schedule: Annotated[Literal["constant", "ramp", "cosine", "interval"], Field(description=SAYS["schedule"])] = "ramp"
    noise: Annotated[float | None, _number("noise", 0, 100)] = None
    warmup: Annotated[int | None, _whole("warmup", 0)] = None
    refresh: Annotated[int, _whole("refresh", 1)] = 1
    exact: Annotated[bool, Field(description=SAYS["exact"])] = False
    draft: Annotated[int | None, _whole("draft", 1)] = None
    revise: Annotated[int, _whole("revise", 0, 16)] = 0
    stream: Annotated[bool, Field(description="Send each step as it is sampled, as server-sent events.")] = False


class TextSampling(Sampling):
    n: Annotated[int, Field(ge=1, le=1024, description="How many texts.")] = 1


class GenerateRequest(TextSampling):
    """Texts that begin with a prompt."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "", "length": 32, "steps": 8, "revise": 4}]})
    prompt: Text = ""
    length: Annotated[
        int | None, Field(ge=1, le=1 << 20, description="Total tokens, prompt included. Default: the model's context.")
    ] = None


class FillRequest(TextSampling):
    """A text with gaps, or tokens with null for gaps."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"text": "The [3] sat on ___ .", "steps": 4, "seed": 0}]})
    text: Annotated[Text | None, Field(description="[8] is a gap of eight tokens, ___ one of three.")] = None
    tokens: Annotated[Tokens | None, Field(max_length=1 << 16, description="Instead of a text.")] = None
    spaced: Annotated[Ids, Field(description="With tokens: positions whose token must begin with a space.")] = []

    @model_validator(mode="after")
    def _one(self) -> FillRequest:
        if (self.text is None) == (self.tokens is None):
            raise ValueError("expected either text or tokens")
        if self.text is not None and self.spaced:
            raise ValueError("spaced goes with tokens, not with a text")
        return self


class AlternativesRequest(StrictBody):
    """Alternatives at a position, given all other tokens."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tokens": [5, None, 7], "position": 1}]})
    tokens: Annotated[Tokens, Field(min_length=1, max_length=1 << 16)]
    position: Annotated[int, Field(ge=0, lt=1 << 16)]
    k: Annotated[int, Field(ge=1, le=100, description="How many.")] = 10


class StreamOptions(BaseModel):
    """What OpenAI's clients ask of a stream."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


NO_EFFECT = {"best_of": 1, "frequency_penalty": 0, "logit_bias": {}, "presence_penalty": 0}


class CompletionRequest(TextSampling):
    """What OpenAI's completions take, as far as it has a meaning here, and how to sample."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"prompt": "The cat", "suffix": " the mat.", "max_tokens": 8, "seed": 0}]}
    )
    prompt: Annotated[
        Text | Several[Text] | Ids | Several[Ids], Field(description="A text or its tokens, or a list of either.")
    ] = ""
    suffix: Text | None = None
    max_tokens: Annotated[int, Field(ge=1, le=1 << 20)] = 16
    stop: Annotated[str, Field(min_length=1, max_length=200)] | Annotated[list[str], Field(max_length=4)] | None = None
    echo: bool = False
    user: Annotated[str | None, Field(max_length=500)] = None
    best_of: Literal[1] | None = None
    stream_options: StreamOptions | None = None
    logprobs: Annotated[
        int | None, Field(ge=0, le=5, description="Return the log-probability of each sampled token, and of no other.")
    ] = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _said(cls, given: Any) -> Any:
        """Clients send null for what they leave open, and some send what has no effect."""
        if not isinstance(given, dict):
            return given
        for name, value in NO_EFFECT.items():
            if given.get(name) not in (None, value):
                raise ValueError(f"{name} is not supported: expected {value}, or nothing")
        return {k: v for k, v in given.items() if v is not None}


class PictureSampling(Sampling):
    label: Annotated[
        Annotated[str, Field(max_length=200)] | Id | None,
        Field(description="Class, by name or number. Default: none."),
    ] = None
    frames: Annotated[bool, Field(description="With stream: the image so far, after each step.")] = False


class PictureRequest(PictureSampling):
    """A picture of a class."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"label": 0, "steps": 8, "seed": 0}]})


class PictureFillRequest(PictureSampling):
    """A picture of which a part is redrawn: its tokens with null there, or a file and a mask."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tokens": [[None, 3], [1, None]], "seed": 0}]})
    tokens: Annotated[
        Annotated[list[Annotated[Tokens, Field(max_length=4096)]], Field(fail_fast=True)] | None,
        Field(max_length=4096, description="Row by row."),
    ] = None
    image: Annotated[
        str | None, Field(max_length=1 << 24, description="Base64 of a PNG or JPEG file; cropped to its centre square.")
    ] = None
    mask: Annotated[
        Annotated[list[Annotated[list[bool], Field(max_length=4096, fail_fast=True)]], Field(fail_fast=True)] | None,
        Field(min_length=1, max_length=4096, description="With image: the cells, or pixels, to redraw."),
    ] = None

    @model_validator(mode="after")
    def _one(self) -> PictureFillRequest:
        if (self.tokens is None) == (self.image is None) or (self.image is None) != (self.mask is None):
            raise ValueError("expected either tokens, or image and mask")
        return self


class Problem(BaseModel):
    message: str
    type: str
    code: int


class ErrorAnswer(BaseModel):
    """Every answer that is an error."""

    error: Problem


class FilledText(BaseModel):
    text: str
    tokens: list[int]
    pieces: list[str]
    steps: Annotated[list[int], Field(description="The last step that sampled each token, -1 where it was given.")]
    probabilities: Annotated[
        list[float | None],
        Field(description="Probability of each sampled token under the model, before temperature and top-p."),
    ]


class TextAnswer(BaseModel):
    model: str
    steps: int
    revision_steps: Annotated[int, Field(description="The number of steps that belong to revision rounds.")]
    lead: Annotated[int, Field(description="Number of tokens before the text itself (BOS).")]
    spaced: list[int]
    seconds: float
    tokens_per_second: float
    texts: list[FilledText]


class Alternative(BaseModel):
    token: int
    text: str
    probability: float


class AlternativesAnswer(BaseModel):
    model: str
    position: int
    alternatives: list[Alternative]


class PictureAnswer(BaseModel):
    model: str
    label: str | None
    steps: int
    seconds: float
    image: Annotated[str, Field(description="Base64 of a PNG file.")]
    tokens: list[list[int]]
    cell_steps: Annotated[list[list[int]], Field(description="The step that sampled each cell, -1 where it was given.")]


class Choice(BaseModel):
    text: str
    index: int
    logprobs: dict[str, Any] | None = None
    finish_reason: Literal["stop", "length"]


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionAnswer(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage


class ModelsAnswer(BaseModel):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]


class Health(BaseModel):
    status: Literal["ok"] = "ok"
    models: list[str]
    version: str
