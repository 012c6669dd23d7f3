"""Short requests that would take much: they are refused, or answered piece by piece."""

import base64
import io

import pytest
import torch
from PIL import Image

from maskless import sampling
from maskless.codec.text import TextCodec
from maskless.how import How
from maskless.serve import pictures, rows, texts
from maskless.serve.host import Host, Limits


@pytest.fixture
def host(models):
    host = Host("pgm", models["pgm"], Limits())
    yield host
    host.batcher.close()


def test_many_lists_are_not_read(server):
    answer = server.post("/v1/fill", b'{"x": [' + b"[]," * 20_000 + b"[]]}")
    assert answer.status == 413
    assert "20,003 lists and objects: expected at most 8,192" in answer.message
    for text in ("[" * 20_000, '\\"[' * 9_000):
        assert server.post("/v1/fill", {"text": text}).status == 400  # brackets of a text are none


def test_a_text_that_cannot_fit_is_not_encoded(host, monkeypatch):
    monkeypatch.setattr(TextCodec, "encode", lambda codec, text: pytest.fail("encoded"))
    long = "a cat " * 20_000
    for read in (
        lambda: texts.from_template(host, long + "[3]"),
        lambda: texts.from_prompt(host, long, None),
        lambda: texts.between(host, "", 3, long),
    ):
        with pytest.raises(ValueError, match=r"120,000 characters long: expected at most 48 tokens"):
            read()


def test_a_text_that_fits_is_never_taken_for_too_long(host):
    codec = host.text
    longest = max((codec.token_text(i) for i in range(codec.vocab) if i != codec.eos), key=len)
    text = longest * (host.length - 1)
    assert len(codec.encode(text)) == host.length - 1
    assert len(texts.from_template(host, text + "[1]").tokens) == host.length


@pytest.mark.parametrize("size", [(65_536, 1), (3, 60)])
def test_a_narrow_picture_is_refused(size):
    """Scaled to the model's shorter side, a line of 2 KB took 640 MB."""
    file = io.BytesIO()
    Image.new("L", size).save(file, "PNG")
    with pytest.raises(
        ValueError, match=rf"image: {size[0]} x {size[1]} pixels, expected an aspect ratio of at most 16"
    ):
        pictures.read_image(base64.b64encode(file.getvalue()).decode())


def test_a_step_of_many_tokens_is_drawn_in_parts(host, monkeypatch):
    """Filters and draws take ten times the memory of the logits; a request of 70 bytes took 700 MB in one step."""

    def decided(cells):
        monkeypatch.setattr(sampling, "CPU_CELLS", cells)
        kinds = ({"top_p": 0.9, "temperature": 2.0}, {"top_k": 3}, {})
        every = [texts.drafts_of(host, [texts.from_prompt(host, "", 40)], How(steps=1, **kind)) for kind in kinds]
        rows.advance([rows.ActiveSequence(drafts, 0) for drafts in every], host.batcher.backend)
        return torch.cat([drafts.tokens for drafts in every]), [drafts.chance.tolist() for drafts in every]

    drawn, sizes = sampling.lg.draw, []
    monkeypatch.setattr(sampling.lg, "draw", lambda logits, u: (sizes.append(logits.numel()), drawn(logits, u))[1])
    whole, chances = decided(1 << 22)
    assert max(sizes) == 3 * 40 * host.vocab
    sizes.clear()
    tokens, same = decided(7 * host.vocab)
    assert max(sizes) == 7 * host.vocab
    assert torch.equal(tokens, whole)
    assert same == chances
