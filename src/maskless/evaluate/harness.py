"""The language model evaluation harness (lm-eval) with maskless models: `python -m maskless.evaluate.harness`.

It takes the options of `lm_eval` and knows one more model, `maskless`, and the tasks of the paper as one, `paper`:

    python -m maskless.evaluate.harness --model_args pretrained=runs/my --tasks paper --batch_size 32

lm-eval finds models of other packages only once they are imported, which this module does; in Python, `register()`.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather, gather_object
from rich.console import Console

from maskless import api
from maskless.checkpoint import Model
from maskless.codec.text import TextCodec
from maskless.evaluate import options
from maskless.how import check_name, check_positive
from maskless.objective import mixed_seed
from maskless.seeds import check_seed
from maskless.terminal import bar, plain

NAME = "maskless"
PAPER = "lambada_openai,arc_easy,arc_challenge,hellaswag,mathqa,piqa,winogrande,social_iqa,openbookqa,boolq,race"
FORMS = {"conditional": options.conditional, "joint": options.joint}
CLIENTS = ("requests", "httpx", "huggingface_hub")  # of the hub that holds the tasks
MOST = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # names of one thing, the first wins
GREEDY = {"one-by-one": options.greedy, "at-once": options.at_once}


class Scorer:
    """A model that answers what lm-eval asks: scores of targets after prefixes, and continuations.

    form: "conditional" (of the target given the prefix) or the paper's "joint"; samples: splits of a target, if needed.
    greedy: whether "is this the greedy answer" is asked token by token or all at once, as in the paper.
    block, block_steps: a continuation comes in blocks of so many tokens from left to right, each filled in so many
    steps in any order; by default a token in each.
    Random numbers come from the seed and the number of a request in its call: no answer depends on the batch size.
    """

    def __init__(
        self,
        model: Model,
        *,
        form: str = "conditional",
        samples: int = 32,
        greedy: str = "one-by-one",
        batch: int = 32,
        seed: int = 0,
        block: int = 32,
        block_steps: int | None = None,
    ) -> None:
        check_name("form", form, FORMS)
        check_name("greedy", greedy, GREEDY)
        check_seed(_whole("seed", seed))
        counts = {"samples": samples, "batch_size": batch, "block": block, "block_steps": block_steps}
        check_positive(**{what: _whole(what, value) for what, value in counts.items() if value is not None})
        if not isinstance(model.codec, TextCodec):
            raise ValueError("lm-eval asks for text: expected a text model with a tokenizer")
        self.model, self.codec, self.length = model.eval(), model.codec, int(model.config.length)
        self.form, self.samples, self.greedy = form, samples, greedy
        self.batch, self.seed, self.block, self.block_steps = batch, seed, block, block_steps
        self.lead = model.lead
        mixture = model.mixture  # one pass scores a target from left to right, where the model was trained to
        left = model.kind == "causal" or (mixture is not None and 1 in mixture.strands(self.length))
        self.exact = left and form == "conditional"

    @property
    def _how(self) -> dict[str, Any]:
        return {"samples": self.samples, "batch": self.batch, "seed": self.seed}

    def score(
        self, requests: Sequence[options.Request], on_batch: options.OnBatch | None = None
    ) -> list[tuple[float, bool]]:
        """log p of each target after its prefix (without the lead), and whether it is the greedy answer."""
        fitted = [options.fitted(prefix, target, self.length, self.lead) for prefix, target in requests]
        ended = fitted
        if self.form == "joint" and self.lead and self.codec.eos is not None:  # the paper's sequence ends in EOS
            closed = [(prefix, [*target, self.codec.eos]) for prefix, target in requests]
            ended = [options.fitted(prefix, target, self.length, self.lead) for prefix, target in closed]
        if self.exact and self.greedy == "one-by-one":
            return options.exact(self.model.network, fitted, batch=self.batch, on_batch=on_batch)
        scores = FORMS[self.form](self.model.network, ended, **self._how, on_batch=on_batch)
        return list(zip(scores, GREEDY[self.greedy](self.model.network, fitted, batch=self.batch), strict=True))

    def whole(self, rows: Sequence[list[int]]) -> list[float]:
        """log p of whole documents, in stretches of the model's context that follow one another."""
        room = self.length - len(self.lead)
        parts = [(i, row[begin : begin + room]) for i, row in enumerate(rows) for begin in range(0, len(row), room)]
        requests: list[options.Request] = [(list(self.lead), part) for _, part in parts]
        totals = [0.0] * len(rows)
        exactly = options.exact(self.model.network, requests, batch=self.batch) if self.exact else []
        found = [score for score, _ in exactly] or options.conditional(self.model.network, requests, **self._how)
        for (i, _), score in zip(parts, found, strict=True):
            totals[i] += score
        return totals

    def continued(
        self,
        prefixes: Sequence[list[int]],
        until: Sequence[str],
        most: int,
        *,
        numbers: Sequence[int] | None = None,
        **how: Any,
    ) -> list[str]:
        """What follows each prefix: at most so many tokens, cut at an EOS or where one of the strings `until` comes.

        The prefix comes first, and the answer gets what it leaves of the context. Only where that is less than `most`
        and less than half the context does the prefix lose its beginning: the answer then gets half, or `most`.
        numbers: of the requests, 0 and on by default.
        """
        room = self.length - len(self.lead)
        sizes = [max(min(most, room - len(prefix)), min(most, max(1, room // 2))) for prefix in prefixes]
        given = [
            [*self.lead, *prefix[max(0, len(prefix) + size - room) :]]
            for prefix, size in zip(prefixes, sizes, strict=True)
        ]
        made: list[list[int]] = [[] for _ in prefixes]
        named = torch.arange(len(prefixes)) if numbers is None else torch.tensor(numbers)

        def ended(i: int) -> bool:
            return self.codec.eos in made[i] or len(made[i]) >= sizes[i] or self._text(made[i], until)[1]

        while going := [i for i in range(len(prefixes)) if not ended(i)]:
            groups: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
            for i in going:
                groups[len(given[i]) + len(made[i]), min(self.block, sizes[i] - len(made[i]))].append(i)
            for (_, more), alike in groups.items():
                steps = None if self.model.kind == "causal" else min(more, self.block_steps or more)
                for begin in range(0, len(alike), self.batch):
                    some = alike[begin : begin + self.batch]
                    rows = torch.tensor([given[i] + made[i] + [0] * more for i in some], dtype=torch.long)
                    known = (torch.arange(rows.shape[1]) < rows.shape[1] - more).expand_as(rows)
                    own: dict[str, Any] = {"steps": steps, "seed": self.seed, "numbers": named[some]}
                    filled = api.fill(self.model, rows, known=known, **own, **how)
                    for i, row in zip(some, filled.tokens.tolist(), strict=True):
                        made[i] += row[-more:]
        return [self._text(ids, until)[0] for ids in made]

    def _text(self, ids: Sequence[int], until: Sequence[str]) -> tuple[str, bool]:
        """The text up to the EOS or the first of the strings, and whether one of them is there."""
        text = self.codec.decode(itertools.takewhile(lambda token: token != self.codec.eos, ids))
        end = min((at for stop in until if stop and (at := text.find(stop)) >= 0), default=None)
        return text[:end], end is not None


def _whole(name: str, value: Any) -> int:
    """A value of --model_args that must be a whole number."""
    if not isinstance(value, int):
        raise ValueError(f"{name} {value!r}: expected a whole number")
    return value


class HarnessModel:
    """What lm-eval asks of a model, answered by a Scorer; `register` puts it before lm-eval's own class, TemplateLM.

    pretrained: a model folder, a run folder, a hub id or a released file, with its EMA weights unless told otherwise.
    """

    cache_hook: Any  # these are TemplateLM's
    rank: int
    world_size: int

    def __init__(
        self,
        pretrained: str = "",
        *,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        tokenizer: str | None = None,
        weights: str = "ema",
        **how: Any,
    ) -> None:
        super().__init__()
        known = inspect.signature(Scorer).parameters.keys() - {"model", "batch"}
        if not pretrained or how.keys() - known:
            wrong = ", ".join(sorted(how.keys() - known)) or "none for pretrained"
            raise ValueError(f"--model_args has {wrong}: expected pretrained=MODEL, and of {', '.join(sorted(known))}")
        state = PartialState(cpu=not torch.accelerator.is_available() or device == "cpu")
        self._rank, self._world_size = state.process_index, state.num_processes
        own = state.num_processes == 1 and torch.accelerator.is_available()  # lm-eval says cuda:0 unasked
        self._device = torch.device(device) if device and own else state.device
        model = api.load(str(pretrained), tokenizer=tokenizer, weights=weights, device=self._device)
        batch = 32 if batch_size is None or str(batch_size).startswith("auto") else int(batch_size)
        self.scorer, self.batch_size = Scorer(model, batch=batch, **how), batch
        if self._rank:  # requests are numbered in each process
            self.scorer.seed = mixed_seed(self.scorer.seed, self._rank)

    @property
    def eot_token_id(self) -> int | None:
        return self.scorer.codec.eos

    @property
    def tokenizer_name(self) -> str:
        return NAME

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.scorer.codec.encode(string)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        pairs = [self._pair(*request.args) for request in requests]
        with bar(Console(stderr=True), "scoring", len(pairs), shown=not disable_tqdm) as advance:
            found = self.scorer.score(pairs, on_batch=advance)
        for request, answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, answer)
        return found

    def _pair(self, context: str, continuation: str) -> options.Request:
        """The ids of both texts together, parted where those of the context alone end or become others.

        So a token that reaches over the boundary is scored; lm-eval's own rule leaves it out. Spaces at the end of the
        context belong to the target, as they do there.
        """
        known, whole = self.tok_encode(context.rstrip()), self.tok_encode(context + continuation)
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(known, whole, strict=False)))
        if not continuation or shared == len(whole):
            raise ValueError(
                f"the continuation {continuation!r} of {context[-40:]!r} is empty: expected a token to score"
            )
        return whole[:shared], whole[shared:]

    def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
        return self.scorer.score([(prefix, target) for _, prefix, target in requests])

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        return self.scorer.whole([self.tok_encode(request.args[0]) for request in requests])

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        groups: defaultdict[str, list[int]] = defaultdict(list)
        for i, request in enumerate(requests):
            groups[repr(sorted(request.args[1].items()))].append(i)
        answers = [""] * len(requests)
        with bar(Console(stderr=True), "filling", len(requests), shown=not disable_tqdm) as advance:
            for numbers in groups.values():
                until, most, how = _generation(requests[numbers[0]].args[1])
                prefixes = [self.tok_encode(requests[i].args[0]) for i in numbers]
                found = self.scorer.continued(prefixes, until, most, numbers=numbers, **how)
                for i, text in zip(numbers, found, strict=True):
                    answers[i] = text
                    self.cache_hook.add_partial("generate_until", requests[i].args, text)
                advance(len(numbers))
        return answers

    def all_gather(self, tensor: Any) -> Any:
        return gather(tensor.reshape(-1)) if self.world_size > 1 else tensor

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        found = gather_object([obj])
        return found if self.rank == dst else None

    def barrier(self) -> None:
        PartialState().wait_for_everyone()


def register() -> type[Any]:
    """The class of the model `maskless` in lm-eval's registry; a second call gives the same one."""
    if find_spec("lm_eval") is None:
        raise ValueError("lm-eval is not installed: pip install 'maskless[lm-eval]'")
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import MODEL_REGISTRY, register_model

    if NAME not in MODEL_REGISTRY:

        @register_model(NAME)
        class MasklessLM(HarnessModel, TemplateLM):  # type: ignore[misc]
            """A maskless model that lm-eval can run."""

    return MODEL_REGISTRY.get(NAME)


def _generation(asked: dict[str, Any]) -> tuple[list[str], int, dict[str, Any]]:
    """Where to stop, after how many tokens at most, and how to draw: by the rules of lm-eval, which `do_sample` heads.

    (They are lm-eval's normalize_gen_kwargs, which the oldest version that we allow does not have.)
    """
    until, warmth, drawn = asked.get("until") or [], asked.get("temperature"), asked.get("do_sample")
    drawn = float(warmth or 0) > 0 if drawn is None else drawn
    how: dict[str, Any] = {"temperature": (1.0 if warmth is None else float(warmth)) if drawn else 0.0}
    how |= {name: asked[name] for name in ("top_p", "top_k") if drawn and asked.get(name)}
    most = next((asked[name] for name in MOST if asked.get(name) is not None), 256)
    return [until] if isinstance(until, str) else list(until), int(most), how


def main(arguments: Sequence[str] | None = None) -> None:
    """Run lm-eval on the given words; the model is `maskless` unless they name another."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        register()
        from lm_eval.__main__ import cli_evaluate

        if not any(word.split("=")[0] in ("--model", "-M") for word in words) and words:
            words += ["--model", NAME]
        sys.argv = ["lm_eval", *_with_paper(words)]
        run: Callable[[], None] = cli_evaluate
        run()
    except Exception as error:
        if not isinstance(error, ValueError) and not _offline(error):
            raise
        print(f"error: {plain(' '.join(str(error).split()))}", file=sys.stderr)
        sys.exit(2)


def _offline(error: Exception) -> bool:
    """Whether this is about a hub that cannot be reached; its clients have errors of their own."""
    clients = {kind.__module__.partition(".")[0] for kind in type(error).__mro__} & {*CLIENTS}
    return isinstance(error, ConnectionError) or bool(clients)


def _with_paper(words: list[str]) -> list[str]:
    """`--tasks paper` names the tasks of the paper."""
    apart = [part for word in words for part in (word.split("=") if word == "--tasks=paper" else [word])]
    pairs = zip(["", *apart], apart, strict=False)
    return [PAPER if before in ("--tasks", "-t") and word == "paper" else word for before, word in pairs]


if __name__ == "__main__":
    main()
