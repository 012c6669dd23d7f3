"""Requests that no document describes: gaps of all sizes, nesting, numbers, texts and pictures that are too much.

Each is a path and a body, made up from a generator of random numbers, so that a run can be repeated.
"""

import base64
import io
import json
import random
from collections.abc import Callable
from typing import Any

from PIL import Image

Attack = tuple[str, bytes]
MOST = (1 << 20) - 64  # bytes of a body, a little less than a server takes
TEXT, PICTURES = (
    ("/v1/fill", "/v1/generate", "/v1/alternatives", "/v1/completions"),
    ("/v1/pictures", "/v1/pictures/fill"),
)
VALID: dict[str, dict[str, Any]] = {
    "/v1/fill": {"text": "the [3] sat on ___ .", "steps": 2},
    "/v1/generate": {"prompt": "the", "steps": 2},
    "/v1/alternatives": {"tokens": [5, None, 7], "position": 1},
    "/v1/completions": {"prompt": "the cat", "suffix": " .", "max_tokens": 4},
    "/v1/pictures": {"label": 0, "steps": 2},
    "/v1/pictures/fill": {"image": "", "mask": [[True]]},
}
FIELDS = ["n", "steps", "length", "seed", "top_k", "top_p", "temperature", "revise", "max_tokens", "position", "k"]
FIELDS += ["spaced", "tokens", "text", "prompt", "suffix", "stop", "model", "order", "label", "guidance", "warmup"]
FIELDS += ["mask", "image", "x"]


def digits(rng: random.Random) -> str:
    zeros, size = rng.choice((0, 0, 1, 10, 1000)), rng.choice((1, 3, 6, 7, 8, 9, 10, 20, 400, 5000))
    return "0" * zeros + "".join(rng.choice("0123456789") for _ in range(size))


def gap(rng: random.Random) -> str:
    """A gap, or what looks like one."""
    wrong = ("[", "]", "[]", "[-1]", "[1", "[1e9]", "[ 3 ]", "[٣]", "[[3]]")
    wrong += ("\\[8]", "\\\\[8]", "\\___", "____", "_" * 3000)
    return f"[{digits(rng)}]" if rng.random() < 0.6 else rng.choice(wrong)


def gaps(rng: random.Random) -> Attack:
    few = [gap(rng) for _ in range(rng.choice((1, 2, 5)))]
    text = "".join(rng.choice(few) + rng.choice(("", " ", "a ")) for _ in range(rng.choice((1, 3, 100, 3000))))
    return "/v1/fill", dump({"text": text[: 1 << 18], "steps": rng.choice((1, 16))})


def nested(rng: random.Random) -> Attack:
    depth, wide = rng.choice((2, 50, 900, 990, 1100, 8000, 100_000)), rng.choice((1, 1, 40))
    begin, end = rng.choice(((b"[", b"]"), (b'{"a":', b"}"), (b"[[],", b"]")))
    one = begin * depth + b"1" + end * (depth if rng.random() < 0.9 else depth - 1)
    inside = b"[" + b",".join([one] * wide) + b"]"
    field = rng.choice(FIELDS).encode()
    path = rng.choice((*TEXT, *PICTURES))
    return path, cut(rng.choice((inside, b'{"%s":%s}' % (field, inside), b'{"text":"a [3]","x":%s}' % inside)))


def crowded(rng: random.Random) -> Attack:
    """Many of the same, in the fields that take lists and in those that do not."""
    what = rng.choice(
        (b"1", b"-1", b"null", b"{}", b"[]", b'""', b'"ab"', b"1.5", b"true", b"1e308", b"123456789012345")
    )
    lists = b"[" + b",".join([what] * rng.choice((5000, 70_000, 340_000))) + b"]"
    if rng.random() < 0.3:
        lists = b"[" + b",".join([lists[:9000].rpartition(b",")[0] + b"]"] * rng.choice((10, 100))) + b"]"
    field = rng.choice(FIELDS).encode()
    if rng.random() < 0.15:
        lists = b"1," + b",".join(b'"f%d":1' % i for i in range(rng.choice((50, 5000, 80_000))))
    return rng.choice((*TEXT, *PICTURES)), cut(b'{"%s":%s}' % (field, lists))


def swapped(rng: random.Random) -> Attack:
    """What would be valid but for one or two fields."""
    path = rng.choice((*TEXT, *PICTURES))
    body = dict(VALID[path])
    for _ in range(rng.choice((1, 1, 2))):
        body[rng.choice(FIELDS)] = value(rng)
    return path, cut(dump(body))


def value(rng: random.Random) -> Any:
    kinds: tuple[Callable[[], Any], ...] = (
        lambda: rng.choice((0, 1, -1, 16, 17, 1024, 1 << 20, 1 << 31, (1 << 63) - 1, 1 << 63, 10**4000)),
        lambda: rng.choice((0.0, 1e-320, 1e308, -1e308, 0.5)),
        lambda: rng.choice((None, True, False, {}, [], [[]], "", "\x00", "\ud800", "[3]", "confidence", "raster")),
        lambda: (
            rng.choice(("a", "漢", "\x00", " ", "a [1] ", "\\[8]", "\U0001f642")) * rng.choice((100, 40_000, 250_000))
        ),
        lambda: [rng.choice((None, 0, 1, 255, 1 << 31)) for _ in range(rng.choice((1, 48, 300, 60_000)))],
    )
    return rng.choice(kinds)()


def heavy(rng: random.Random) -> Attack:
    """What may be asked for, and is much."""
    how = {"n": rng.choice((1, 16)), "steps": rng.choice((1, 8, 1024)), "seed": rng.randrange(1 << 63)}
    how |= rng.choice(({}, {"top_p": 0.9, "top_k": 4000, "temperature": 0.7}, {"order": "confidence"}, {"revise": 16}))
    stream = {"stream": rng.random() < 0.3}
    return rng.choice((("/v1/generate", dump(how | stream)), ("/v1/completions", dump(how | {"max_tokens": 40}))))


def drawn(rng: random.Random) -> Attack:
    """A file that may be a picture, with a mask that may fit."""
    size = rng.choice(
        ((1, 1), (32, 32), (2048, 2048), (60_000, 1), (1, 60_000), (4096, 1024), (3000, 3000), (512, 8000))
    )
    file = io.BytesIO()
    mode = rng.choice(("1", "L", "P", "RGB", "RGBA", "LA", "I;16"))
    Image.new(mode, size).save(file, "JPEG" if mode == "RGB" else "PNG")
    data = bytearray(file.getvalue())
    if rng.random() < 0.4:
        data = data[: rng.randrange(len(data))]
    if rng.random() < 0.4 and data:
        for _ in range(5):
            data[rng.randrange(len(data))] = rng.randrange(256)
    side = rng.choice((1, 4, 16, 32, 300))
    mask = [[rng.random() < 0.5] * side] * side
    return "/v1/pictures/fill", cut(dump({"image": base64.b64encode(data).decode(), "mask": mask, "steps": 2}))


def broken(rng: random.Random) -> Attack:
    """A valid body that ends too soon, or has other bytes in it."""
    path = rng.choice((*TEXT, *PICTURES))
    data = bytearray(dump(VALID[path]))
    for _ in range(rng.choice((0, 1, 3))):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return path, bytes(data[: rng.randrange(len(data) + 1)])


KINDS = (gaps, gaps, gaps, nested, crowded, swapped, swapped, swapped, heavy, drawn, broken)
KNOWN: tuple[Attack, ...] = (  # each of these took more than a gigabyte, or stopped the server for seconds
    ("/v1/fill", b'{"text": "%s"}' % (b"[0000000001000000]" * 100)),
    ("/v1/pictures/fill", b'{"image": "", "mask": [%s]}' % b",".join([b"[" + b",".join([b"1"] * 4096) + b"]"] * 120)),
    ("/v1/fill", b'{"x": [%s]}' % b",".join([b"[]"] * 340_000)),
    ("/v1/generate", b'{"n": 16, "steps": 1, "top_p": 0.9, "top_k": 4000, "temperature": 0.7}'),
)


def attack(seed: int) -> Attack:
    """The request of a number."""
    rng = random.Random(seed)
    return rng.choice(KINDS)(rng)


def dump(body: Any) -> bytes:
    return json.dumps(body).encode()


def cut(body: bytes) -> bytes:
    return body[:MOST]
