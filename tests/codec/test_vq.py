"""Image codecs: gradients straight through the codes, tokens and pixels that come back, and mistakes that are named."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from vq_made import make, noise

from maskless.codec import vq as module
from maskless.codec.vq import VQ, Codebook, PixelCodec, VQConfig, read_codec, to_images, to_pixels

# The codebook


def test_gradients_go_straight_through_the_codes():
    torch.manual_seed(0)
    book, weights = Codebook(16, 4), torch.randn(2, 4, 3, 5)
    latents = torch.randn(2, 4, 3, 5, requires_grad=True)
    quantised = book(latents)
    assert quantised.vectors.equal(book.lookup(quantised.indices))  # the codes to the last bit
    (quantised.vectors * weights).sum().backward()
    straight, latents.grad = latents.grad, None
    (F.normalize(latents, dim=1) * weights).sum().backward()
    torch.testing.assert_close(straight, latents.grad)
    assert book.embedding.weight.grad is None


def test_codes_follow_latents_and_latents_commit_to_codes():
    torch.manual_seed(0)
    book, latents = Codebook(16, 4), torch.randn(2, 4, 3, 5, requires_grad=True)
    quantised = book(latents)
    distance = (quantised.vectors - quantised.latents).square().mean()
    torch.testing.assert_close(quantised.codebook, distance)
    torch.testing.assert_close(quantised.commitment, distance)
    quantised.codebook.backward()
    assert latents.grad is None
    unused = torch.ones(16, dtype=torch.bool)
    unused[quantised.indices.unique()] = False
    assert (book.embedding.weight.grad[unused] == 0).all()
    assert (book.embedding.weight.grad[~unused] != 0).any(1).all()
    book.embedding.weight.grad = None
    quantised.commitment.backward()
    assert book.embedding.weight.grad is None
    assert latents.grad.abs().sum() > 0


@torch.no_grad()
def test_only_the_directions_of_codes_and_latents_count():
    codec, images = make(), noise(2, 3, 8, 8)
    indices = codec.encode(images)
    out = codec.decode(indices)
    codec.quantize.embedding.weight *= torch.rand(20, 1) * 5 + 0.1
    codec.quant_conv.weight *= 3
    codec.quant_conv.bias *= 3
    assert codec.encode(images).equal(indices)
    torch.testing.assert_close(codec.decode(indices), out, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(codec.quantize.vectors().norm(dim=1), torch.ones(20))
    torch.testing.assert_close(codec.quantize.lookup(indices).norm(dim=1), torch.ones(2, 4, 4))


def test_many_places_are_looked_up_in_pieces(monkeypatch):
    torch.manual_seed(0)
    book, latents = Codebook(16, 4), F.normalize(torch.randn(101, 4), dim=1)
    whole = book.nearest(latents)
    monkeypatch.setattr(module, "TABLE", 16 * 7)
    assert book.nearest(latents).equal(whole)


def test_dead_codes_are_revived_where_latents_are():
    torch.manual_seed(0)
    book = Codebook(16, 4)
    with torch.no_grad():
        book.embedding.weight[0] = torch.eye(4)[0]
        book.embedding.weight[1:] = -torch.eye(4)[0]  # all but one look away
    latents = F.normalize(torch.eye(4)[0] + 0.3 * torch.randn(40, 4), dim=1)
    before = book.nearest(latents)
    assert before.unique().tolist() == [0]
    dead = torch.arange(16) > 0
    moved = book.revive(dead, latents, torch.Generator().manual_seed(3))
    assert moved.tolist() == list(range(1, 16))
    after = book.nearest(latents)
    assert set(after.tolist()) >= set(range(1, 16))
    far = (book.vectors()[after] - latents).norm(dim=1).mean()
    assert far < 0.5 * (book.vectors()[before] - latents).norm(dim=1).mean()
    again = Codebook(16, 4)
    again.revive(dead, latents, torch.Generator().manual_seed(3))
    assert again.embedding.weight[1:].equal(book.embedding.weight[1:])


def test_no_more_codes_are_revived_than_there_are_latents_and_the_living_stay():
    book, latents = Codebook(16, 4), F.normalize(torch.randn(3, 4), dim=1)
    before = book.embedding.weight.clone()
    dead = torch.arange(16) % 2 == 0
    assert book.revive(dead, latents, torch.Generator()).tolist() == [0, 2, 4]
    changed = (book.embedding.weight != before).any(1)
    assert changed.nonzero().flatten().tolist() == [0, 2, 4]


# Round trips


@pytest.mark.parametrize("factor", [2, 4, 8])
@pytest.mark.parametrize(("height", "width"), [(16, 16), (8, 24)])
def test_grids_of_any_shape(factor, height, width):
    codec, images = make(factor), noise(2, 3, height, width)
    indices = codec.encode(images)
    assert codec.factor == factor
    assert indices.shape == (2, height // factor, width // factor)
    out = codec.decode(indices)
    assert out.shape == images.shape
    torch.testing.assert_close(out, codec(images)[0].detach(), rtol=0, atol=1e-4)
    one = codec.encode(images[1:])  # an image is encoded by itself
    assert one.equal(indices[1:])


def test_tokens_may_be_of_any_whole_kind():
    codec = make()
    indices = codec.encode(noise(1, 3, 8, 8))
    assert codec.decode(indices.to(torch.uint16)).equal(codec.decode(indices))


def test_a_saved_codec_gives_the_same_tokens_and_pixels(tmp_path):
    codec, images = make(4), noise(2, 3, 16, 8)
    codec.save(tmp_path / "new" / "codec")
    loaded = read_codec(tmp_path / "new" / "codec")
    assert isinstance(loaded, VQ)
    assert loaded.config == codec.config
    assert not loaded.training
    assert loaded.encode(images).equal(codec.encode(images))
    assert loaded.decode(codec.encode(images)).equal(codec.decode(codec.encode(images)))
    other = make(4, seed=5)
    other.save(tmp_path / "new" / "codec")  # over the old one
    assert read_codec(tmp_path / "new").encode(images).equal(other.encode(images))  # as a run's folder
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["codec", "config.json", "model.safetensors", "new"]


def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    def full(*args, **how):
        raise OSError("disk full")

    codec, images = make(), noise(1, 3, 8, 8)
    with monkeypatch.context() as patch:
        patch.setattr(module.json, "dumps", full)  # the weights are written, then the disk is full
        with pytest.raises(OSError, match="disk full"):
            codec.save(tmp_path / "codec")
    assert list(tmp_path.iterdir()) == []
    codec.save(tmp_path / "codec")
    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(OSError, match="disk full"):
        make(seed=7).save(tmp_path / "codec")
    assert read_codec(tmp_path / "codec").encode(images).equal(codec.encode(images))


def test_bytes_come_back():
    pixels = np.arange(256, dtype=np.uint8).reshape(1, 8, 32, 1).repeat(3, axis=3)
    images = to_images(pixels)
    assert images.shape == (1, 3, 8, 32)
    assert (images.min(), images.max()) == (-1, 1)
    assert to_pixels(images).numpy().tolist() == pixels.tolist()
    assert to_pixels(torch.tensor([-1.5, 1.5]).view(1, 1, 1, 2)).flatten().tolist() == [0, 255]


# Pixels as tokens


@pytest.mark.parametrize(("levels", "channels"), [(17, 1), (2, 1), (256, 1), (3, 3), (5, 2)])
def test_every_token_is_a_pixel_and_every_pixel_a_token(levels, channels):
    codec = PixelCodec(levels, channels)
    assert codec.codes == levels**channels
    tokens = torch.arange(codec.codes).view(1, 1, -1)
    images = codec.decode(tokens)
    assert images.shape == (1, channels, 1, codec.codes)
    assert images.flatten(0, 2).T.unique(dim=0).shape == (codec.codes, channels)
    assert (images.min(), images.max()) == (-1, 1)
    assert codec.encode(images).equal(tokens)


# Mistakes


@pytest.mark.parametrize(
    ("images", "line"),
    [
        (torch.zeros(1, 3, 8, 10), "images of 8 x 10 pixels: expected multiples of the codec's factor 4"),
        (torch.zeros(1, 3, 8, 8, dtype=torch.uint8), r"images are uint8 of shape \(1, 3, 8, 8\): expected floats"),
        (torch.full((1, 3, 8, 8), 255.0), "images have values from 255 to 255: expected -1 to 1"),
        (torch.full((1, 3, 8, 8), float("nan")), "images have values from nan to nan: expected -1 to 1"),
        (torch.zeros(3, 8, 8), r"images are float32 of shape \(3, 8, 8\): expected floats .* \(B, 3, H, W\)"),
        (torch.zeros(1, 1, 8, 8), r"expected floats in \[-1, 1\] of shape \(B, 3, H, W\)"),
        (torch.zeros(0, 3, 8, 8), "expected at least one image"),
    ],
)
def test_images_that_cannot_be_encoded(images, line):
    with pytest.raises(ValueError, match=line):
        make(4).encode(images)


@pytest.mark.parametrize("codec", [make(), PixelCodec(20)], ids=["vq", "pixels"])
@pytest.mark.parametrize(
    ("tokens", "line"),
    [
        (torch.tensor([[[3, 20]]]), "a token is 20: expected 0 to 19"),
        (torch.tensor([[[-1, 2]]]), "a token is -1: expected 0 to 19"),
        (torch.zeros(1, 2, 2), r"tokens are float32 of shape \(1, 2, 2\): expected whole numbers"),
        (torch.zeros(4, dtype=torch.long), r"expected whole numbers of shape \(B, h, w\)"),
    ],
)
def test_tokens_that_cannot_be_decoded(codec, tokens, line):
    with pytest.raises(ValueError, match=line):
        codec.decode(tokens)


@pytest.mark.parametrize(
    ("sizes", "line"),
    [
        ({"width": 48}, "width 48 does not fit: expected a multiple of 32"),
        ({"multipliers": (1,)}, r"multipliers \[1\]: expected 1 first"),
        ({"multipliers": (2, 2)}, r"multipliers \[2, 2\]: expected 1 first"),
    ],
)
def test_sizes_that_contradict(sizes, line):
    with pytest.raises(ValueError, match=line):
        VQConfig(**sizes)


def test_folders_that_are_no_codecs(tmp_path):
    with pytest.raises(ValueError, match=r"absent is not a codec folder: it has no config.json"):
        read_codec(tmp_path / "absent")
    folder = tmp_path / "codec"
    make().save(folder)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:100])
    with pytest.raises(ValueError, match="is damaged or not a safetensors file"):
        read_codec(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"it has no model.safetensors"):
        read_codec(folder)
    make(codes=21).save(tmp_path / "other")
    (folder / "model.safetensors").write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"'quantize.embedding.weight' is \(21, 4\), expected \(20, 4\)"):
        read_codec(folder)
    for content in ({"kind": "partition", "codec": {}}, {"kind": "vq", "codec": {"depth": 2}}, {"kind": "vq"}):
        (folder / "config.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match=r"config.json is not a codec's configuration"):
            read_codec(folder)
    for text in ("[" * 100_000, '{"kind": "vq", "codec": {"codes": ' + "9" * 5_000 + "}}", '{"kind": [], "codec": {}}'):
        (folder / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config.json is not a codec's configuration") as error:
            read_codec(folder)
        assert "\n" not in str(error.value)
