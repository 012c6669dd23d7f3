"""Pictures come out the same by the engine as by the plain loop, which it stands in for."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from maskless import images
from maskless.checkpoint import Model
from maskless.codec.vq import PixelCodec
from maskless.drafts import Step
from maskless.engine import backends
from maskless.images import class_ids, fill_image, generate_images
from maskless.nn.maskgit import MaskGIT, MaskGITConfig
from maskless.nn.partition import PartitionConfig, PartitionTransformer
from tiny_networks import shaken

CODES, CLASSES, SIDE = 9, 4, 5
LENGTH = 1 + SIDE * SIDE
KINDS = {
    "full": {"registers": True},
    "ordered": {"registers": True, "context": "ordered"},
    "2d": {"rope": "2d"},
    "2d, ordered": {"registers": True, "context": "ordered", "swap": "gated", "rope": "2d"},
    "no labels": {"classes": None, "context": "ordered", "registers": True},
    "aggregate": {"queries": "mean"},  # which the engine does not serve
}


def model_of(kind: str) -> Model:
    torch.manual_seed(0)
    grid = (SIDE, SIDE)
    network: nn.Module
    if kind == "maskgit":
        sizes = {"vocab": CODES + 1, "mask": CODES, "length": LENGTH, "classes": CLASSES, "width": 32, "heads": 2}
        network = MaskGIT(MaskGITConfig(**sizes, layers=2, hidden=24, grid=grid))
    else:
        sizes = {"vocab": CODES + 2, "length": LENGTH, "width": 32, "heads": 2, "condition": 8, "classes": CLASSES}
        network = PartitionTransformer(
            PartitionConfig(**sizes | {"encoder": 2, "decoder": 2, "grid": grid} | KINDS[kind])
        )
    return Model(shaken(network, 0.2), PixelCodec(CODES), "image")


@pytest.fixture
def watched(monkeypatch):
    """How many runs the engine has taken."""
    taken = []
    real = backends.engine_of

    def engine_of(network):
        taken.append(network)
        return real(network)

    monkeypatch.setattr(backends, "engine_of", engine_of)
    return taken


def plainly(monkeypatch, draw):
    with monkeypatch.context() as patch:
        patch.setattr(backends, "serves", lambda network: False)
        return draw()


HOWS = [
    {},
    {"guidance": 3.0, "steps": 6},
    {"guidance": 1.0, "schedule": "constant", "steps": 25, "order": "raster"},
    {"guidance": 2.0, "counts": "mdlm", "order": "random", "steps": 7},
    {"guidance": 2.0, "temperature": 0.8, "top_k": 5, "top_p": 0.9, "warmup": 3, "steps": 5},
    {"guidance": 3.0, "schedule": "interval", "regions": 2},
    {"guidance": 3.0, "schedule": "cosine", "counts": "cosine", "order": "raster", "steps": 6},
]


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("kind", [*KINDS, "maskgit"])
def test_pictures_by_label_are_those_of_the_plain_loop(kind, how, watched, monkeypatch):
    model, steps = model_of(kind), ([], [])
    if model.config.classes is None:
        how = {name: value for name, value in how.items() if name not in ("guidance", "schedule")}
    labels = {"n": 5} if model.config.classes is None else {"labels": [3, 0, 3, 1, 2]}
    expected = plainly(monkeypatch, lambda: generate_images(model, **labels, seed=7, on_step=steps[0].append, **how))
    assert not watched
    drawn = generate_images(model, **labels, seed=7, on_step=steps[1].append, **how)
    assert bool(watched) == (kind != "aggregate")
    for one, other in zip(drawn, expected, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.steps, other.steps)
        assert np.array_equal(np.asarray(one.image), np.asarray(other.image))

    def told(seen: list[Step]) -> list[tuple]:
        return [(s.number, s.rows.tolist(), s.positions.tolist(), s.tokens.tolist()) for s in seen]

    assert told(steps[1]) == told(steps[0])


@pytest.mark.parametrize("kind", ["full", "ordered", "maskgit"])
def test_what_is_known_stays_and_the_rest_is_that_of_the_plain_loop(kind, watched, monkeypatch):
    model = model_of(kind)
    pixels = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE), dtype=np.uint8)
    known = np.random.default_rng(1).random((SIDE, SIDE)) < 0.5
    for label in (2, None):

        def draw(label=label):
            return fill_image(model, Image.fromarray(pixels), known, label, guidance=2.0, seed=3)

        expected, mine = plainly(monkeypatch, draw), draw()
        assert torch.equal(mine.tokens, expected.tokens)
        assert np.array_equal(np.asarray(mine.image)[known], pixels[known])
    assert len(watched) == 2


@pytest.mark.parametrize("kind", ["full", "ordered", "maskgit"])
def test_a_picture_filled_without_a_label_is_of_no_class(kind):
    """So there is nothing for guidance to lead away from."""
    model, known = model_of(kind), np.random.default_rng(1).random((SIDE, SIDE)) < 0.3
    model.classes = ("ant", "bee", "cat", "dog")
    pixels = np.zeros((SIDE, SIDE), dtype=np.uint8)

    def drawn(label: int | None) -> list[images.Picture]:
        return [fill_image(model, pixels, known, label, guidance=weight, seed=3) for weight in (0.0, 3.0)]

    plain, guided = drawn(None)
    assert plain.label is guided.label is None
    assert torch.equal(plain.tokens, guided.tokens)
    for label, name in enumerate(model.classes):
        one, other = drawn(label)
        assert one.label == other.label == name
        assert not torch.equal(one.tokens, other.tokens)


def test_a_picture_is_the_same_alone_and_in_a_batch():
    model = model_of("ordered")
    rows: list[int] = []
    together = generate_images(model, [0, 1, 2, 3], guidance=2.0, seed=1)
    watch = {"on_step": lambda step: rows.extend(step.rows.tolist())}
    parts = generate_images(model, [0, 1, 2, 3], guidance=2.0, seed=1, batch=1, **watch)
    assert [rows.count(row) for row in range(4)] == [SIDE * SIDE] * 4
    assert all(torch.equal(one.tokens, other.tokens) for one, other in zip(together, parts, strict=True))


def test_without_classes_maskgit_draws_with_the_label_that_was_trained():
    sizes = {"vocab": CODES + 1, "mask": CODES, "length": LENGTH, "width": 32, "heads": 2, "layers": 1}
    network = MaskGIT(MaskGITConfig(**sizes, classes=1, grid=(SIDE, SIDE)))
    assert class_ids(Model(network, PixelCodec(CODES), "image"), None, 3).tolist() == [1, 1, 1]
    assert class_ids(Model(network, PixelCodec(CODES), "image", ["cat"]), None, 3).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("kind", "labels", "n", "says"),
    [("no labels", [1], None, "this model knows no classes"), ("full", [1], 2, "n 2 and 1 labels: expected one")],
)
def test_labels_that_do_not_fit_are_named(kind, labels, n, says):
    with pytest.raises(ValueError, match=says):
        class_ids(model_of(kind), labels, n)


@pytest.mark.parametrize("kind", [*KINDS, "maskgit"])
def test_the_confidence_order_has_its_logits_from_the_engine(kind, watched, monkeypatch):
    model = model_of(kind)
    how = {"order": "confidence", "steps": 6, "counts": "arccos-after-one", "seed": 2}
    how |= {"n": 3} if model.config.classes is None else {"labels": [3, 0, 1], "guidance": 2.0}
    drawn = generate_images(model, **how)
    assert bool(watched) == (kind != "aggregate")
    for one, other in zip(drawn, plainly(monkeypatch, lambda: generate_images(model, **how)), strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.steps, other.steps)
