"""A causal language model that judges texts: the perplexity that it gives them, and what it makes of them.

Any model that transformers can read: a hub id, a local folder, a GGUF file. It computes in float32.

Shapes: N texts, n tokens of a window, D width, V vocabulary.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from maskless.codec.text import TextCodec
from maskless.terminal import first_line

DEFAULT = "openai-community/gpt2-large"  # of the paper's tables


class Judge:
    """A causal LM with its tokenizer.

    lead: what the tokenizer puts before a text (a BOS, or nothing), which is context and does not count.
    """

    def __init__(self, network: Any, tokenizer: Any, name: str) -> None:
        self.network, self.tokenizer, self.name = network.eval(), tokenizer, name
        self.context = int(getattr(network.config, "max_position_embeddings", 1024))
        bos = getattr(tokenizer, "bos_token_id", None)
        self.lead: list[int] = [bos] if bos is not None and tokenizer("").input_ids[:1] == [bos] else []

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    def digest(self) -> str:
        """Tells judges apart: the sha256 of the sum of each weight."""
        found = hashlib.sha256()
        for name, value in self.network.state_dict().items():
            found.update(f"{name} {tuple(value.shape)} {float(value.double().sum()):.9e}".encode())
        return found.hexdigest()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The judge's own tokens of each text."""
        if not texts:
            return []
        found: list[list[int]] = self.tokenizer(list(texts), add_special_tokens=False, verbose=False).input_ids
        return found

    def shares_vocabulary(self, codec: TextCodec) -> bool:
        """Whether each id means the same to both, so that raw tokens can be judged."""
        return bool(self.tokenizer.get_vocab() == codec.tokenizer.get_vocab())

    @torch.no_grad()
    def costs(self, rows: Sequence[Sequence[int]], *, batch: int = 8) -> Tensor:
        """Nats and how many tokens they are of, for each row of the judge's ids.  -> (N, 2) float64

        Every token counts but the first, which nothing predicts unless there is a lead. What is longer than the judge's
        context is read in windows that overlap by half, each token counted once.
        """
        led = [[*([] if [*row[:1]] == self.lead else self.lead), *row] for row in rows]  # ids may bring their own BOS
        windows = [(i, *window) for i, row in enumerate(led) for window in _windows(len(row), self.context)]
        windows.sort(key=lambda window: window[2] - window[1])
        found = torch.zeros(len(rows), 2, dtype=torch.float64)
        for begin in range(0, len(windows), batch):
            some = windows[begin : begin + batch]
            ids, real = _padded([led[i][a:b] for i, a, b, _ in some])
            logits = self._forward(ids, real).logits[:, :-1]
            answers = ids[:, 1:].to(logits.device)
            nats = F.cross_entropy(logits.float().transpose(1, 2), answers, reduction="none").double().cpu()
            for (i, a, b, first), each in zip(some, nats, strict=True):
                counted = each[first - a - 1 : b - a - 1]
                found[i] += torch.tensor([float(counted.sum()), len(counted)], dtype=torch.float64)
        return found

    @torch.no_grad()
    def features(self, rows: Sequence[Sequence[int]], *, batch: int = 8) -> Tensor:
        """The last hidden state at the last token of each row, as MAUVE compares them.  -> (N, D)"""
        cut = [[*self.lead, *row][: self.context] or [0] for row in rows]
        found = []
        for begin in range(0, len(cut), batch):
            ids, real = _padded(cut[begin : begin + batch])
            states = self._forward(ids, real, output_hidden_states=True).hidden_states[-1]
            found.append(states[torch.arange(len(ids)), real.sum(1) - 1].float().cpu())
        return torch.cat(found)

    def _forward(self, ids: Tensor, real: Tensor, **more: Any) -> Any:
        return self.network(input_ids=ids.to(self.device), attention_mask=real.long().to(self.device), **more)


def judge(name: str = DEFAULT, *, device: torch.device | str = "cpu") -> Judge:
    """The judge of a hub id, of a folder that `save_pretrained` wrote, or of a GGUF file."""
    if find_spec("transformers") is None:
        raise ValueError("generative perplexity needs transformers: pip install 'maskless[judge]'")
    path = Path(name)
    where: dict[str, Any] = {}
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"judge {name}: no such file")
        if find_spec("gguf") is None:
            raise ValueError(f"judge {name}: a GGUF file needs the package gguf: pip install 'maskless[judge]'")
        place, where = str(path.parent), {"gguf_file": path.name}
    elif path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"judge {name}: the folder holds no config.json, it is not a model of transformers")
        place = str(path)
    elif path.is_file() or name.startswith((".", "/")) or name.count("/") > 1:
        raise ValueError(f"judge {name}: expected a hub id, a folder with a model of transformers, or a .gguf file")
    else:
        place = name
    return Judge(*_read(place, name, where, device), Path(name).name if where or path.is_dir() else name)


def _read(place: str, name: str, where: dict[str, Any], device: torch.device | str) -> tuple[Any, Any]:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as theirs

    theirs.disable_progress_bar()
    theirs.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # one line of ours says what is wrong
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the reader of GGUF files has bars of its own
            network: Any = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **where)
            tokenizer = AutoTokenizer.from_pretrained(place, **where)
    except Exception as error:  # transformers, huggingface_hub, httpx: each raises its own
        raise ValueError(f"judge {name} cannot be read: {first_line(error)}") from error
    return network.to(device), tokenizer


def _windows(n: int, context: int) -> Iterator[tuple[int, int, int]]:
    """Begin, end and the first that counts, of windows that count each of the tokens 1 to n-1 once."""
    end = min(n, context)
    if n > 1:
        yield 0, end, 1
    while end < n:
        begin, first = end - max(1, context // 2), end
        end = min(n, begin + context)
        yield begin, end, first


def _padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Rows filled up with 0 on the right, and which are real.  -> (B, n), (B, n) bool"""
    lengths = torch.tensor([len(row) for row in rows])
    ids = pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], batch_first=True)
    return ids, torch.arange(ids.shape[1]) < lengths[:, None]
