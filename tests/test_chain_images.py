"""Chains of images: drawn in an order of their mixture, with a likelihood along each order that is a distribution's."""

import itertools
import warnings

import numpy as np
import pytest
import torch

from maskless import log_likelihood
from maskless.checkpoint import Model
from maskless.codec.vq import PixelCodec
from maskless.decide import drafts_of, settled
from maskless.evaluate.orders import ANY_ORDER, image_ways, of_images
from maskless.how import COUNTS, IMAGE_ORDERS, How
from maskless.images import fill_image, generate_images
from maskless.logits import row_keys
from maskless.mixture import IMAGE_FAMILIES, Mixture
from maskless.nn.partition import PartitionConfig, PartitionTransformer
from maskless.objective import noise
from maskless.train.config import TrainConfig
from maskless.train.tasks import objective_of
from tiny_networks import shaken

EVERY = list(itertools.product((0, 1, 3), repeat=4))  # images of 2 x 2 cells: of 2 codes, and the BOS's own id
CACHED = [order for order in IMAGE_ORDERS if order != "confidence"]


def artist(orders: str | None = "random", grid: tuple[int, int] = (4, 6), codes: int = 5, classes: int | None = 3):
    """A chain as data of one's own has it: labels, registers, a BOS and positions by row and column."""
    torch.manual_seed(0)
    sizes = {"vocab": codes + 2, "never": codes, "length": 1 + grid[0] * grid[1], "width": 32, "heads": 2}
    kinds = {"classes": classes, "registers": True, "rope": "2d", "context": "ordered", "swap": "gated", "grid": grid}
    network = PartitionTransformer(PartitionConfig(**sizes, encoder=1, decoder=1, condition=8, **kinds))
    mixture = None if orders is None else Mixture.parse(orders, image=True)
    return Model(shaken(network, 0.3), PixelCodec(codes), "image", mixture=mixture)


# How it is drawn


@pytest.mark.parametrize(
    ("orders", "expected"),
    [
        (None, "halton"),
        ("random=50,halton=25,regions=25", "halton"),
        ("random=50,regions=50", "halton"),  # one of all orders
        ("regions2=1,raster=1", "regions"),
        ("raster", "raster"),
    ],
)
def test_the_order_follows_the_mixture(orders, expected):
    assert settled(artist(orders), How(), 24).order == expected


def test_an_order_that_was_never_trained_on_is_warned_of():
    with pytest.warns(UserWarning, match=r"this model was trained on raster=100: the order halton is new to it"):
        generate_images(artist("raster"), [0], order="halton")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for order in IMAGE_ORDERS:
            generate_images(artist("random"), [0], order=order, steps=4)


def test_regions_take_a_cell_of_each_in_a_step_unless_told_otherwise():
    model = artist("regions2", grid=(4, 6))
    (one,) = generate_images(model, [1])
    assert one.steps.tolist() == 2 * [[0, 1, 2] * 2, [3, 4, 5] * 2]
    (four,) = generate_images(model, [1], regions=4)
    assert int(four.steps.max()) == 1  # regions of 1 x 2 cells
    (grown,) = generate_images(model, [1], regions=2, counts="arccos", steps=8)
    assert int(grown.steps.max()) == 7
    assert settled(artist("regions", grid=(16, 16)), How(order="regions"), 256).steps == 64


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"regions": 5}, "regions 5 of a grid of 4 x 6 is out of range: expected 1 to 4"),
        ({"regions": 2, "order": "halton"}, "regions 2 with order 'halton': expected the order regions, or none"),
        ({"regions": 0}, "regions 0 is out of range"),
        ({"steps": 0}, "steps 0 is out of range"),
    ],
)
def test_regions_that_do_not_fit_are_refused(how, message):
    with pytest.raises(ValueError, match=message):
        generate_images(artist(), [0], **how)


@pytest.mark.parametrize("order", CACHED)
@pytest.mark.parametrize("counts", COUNTS)
def test_every_cached_order_takes_every_counts_with_guidance(order, counts):
    model = artist("random=1,halton=1,raster=1,regions=1")
    drawn = generate_images(model, [0, 2], order=order, counts=counts, steps=6, guidance=2.0, top_p=0.9)
    for one in drawn:
        assert ((one.steps >= 0) & (one.steps < 6)).all()
        assert (one.tokens < 5).all()


@pytest.mark.parametrize("order", CACHED)
def test_images_are_drawn_exactly_too(order):
    (one,) = generate_images(artist(), [0], order=order, exact=True, seed=1)
    assert (one.steps >= 0).all()


@pytest.mark.parametrize("orders", [*IMAGE_FAMILIES, "regions2", "random=1,halton=1"])
@pytest.mark.parametrize("order", [None, *CACHED])
@pytest.mark.filterwarnings("ignore:this model was trained on")
def test_what_is_known_stays_and_comes_first(orders, order):
    model, random = artist(orders), np.random.default_rng(0)
    pixels, known = random.integers(0, 256, (4, 6), dtype=np.uint8), random.random((4, 6)) < 0.6
    filled = fill_image(model, pixels, known, 1, order=order, guidance=1.0)
    assert np.array_equal(np.asarray(filled.image)[known], pixels[known])
    assert ((filled.steps.numpy() < 0) == known).all()
    row = torch.from_numpy(np.concatenate([[True], known.ravel()]))[None]
    how = How(order=order)
    made = drafts_of(model, row.long(), row, row_keys(0, torch.zeros(1).long()), how, labels=torch.tensor([0]))
    first = made.plan.order[0, : int(row.sum())].tolist()
    assert first[0] == 0
    assert first == row[0].nonzero()[:, 0].tolist()  # as they stand in the grid


# How likely an image is


@pytest.mark.parametrize("order", ["raster", "halton", "regions", None])
def test_the_likelihoods_of_all_images_add_up_to_one_along_an_order(order):
    model = artist(grid=(2, 2), codes=2)
    every = torch.tensor(EVERY).view(-1, 2, 2)
    way = {"order": order} if order else {"order": torch.tensor([0, 3, 1, 4, 2])}
    for labels in (None, [1] * len(every)):
        score = log_likelihood(model, every, labels=labels, **way)
        assert float(score.exp().sum()) == pytest.approx(1, abs=1e-5)
    assert not torch.allclose(score, log_likelihood(model, every, labels=[2] * len(every), **way))


@pytest.mark.parametrize("how", [{"order": "halton", "steps": 2}, {"order": "random", "steps": 3}, {"regions": 2}])
def test_the_likelihoods_of_all_images_add_up_to_one_in_the_steps_of_a_sampler(how):
    model = artist(grid=(2, 2), codes=2)
    rows = torch.cat([torch.tensor(model.lead).expand(len(EVERY), 1), torch.tensor(EVERY)], 1)
    costs = torch.cat([of_images(model, row[None], torch.tensor([1]), How(**how), seed=3) for row in rows])
    assert float((-costs).exp().sum()) == pytest.approx(1, abs=1e-5)


def test_the_same_image_has_the_same_likelihood_as_a_grid_and_as_a_row():
    model = artist()
    grid = torch.randint(5, (4, 6), generator=torch.Generator().manual_seed(1))
    row = torch.cat([torch.tensor(model.lead), grid.flatten()])
    for how in ({"order": "raster"}, {"order": "regions", "regions": 2}, {"samples": 2}, {"orders": 2}):
        one = log_likelihood(model, grid, labels=[1], **how)
        assert one.ndim == 0
        assert torch.equal(one, log_likelihood(model, row[None], labels=[1], **how)[0])
    known = torch.ones(4, 6, dtype=torch.bool)
    known[1, 2] = False
    assert log_likelihood(model, grid, known, order="raster") > log_likelihood(model, grid, order="raster")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"order": "left"}, "unknown order 'left': expected one of halton, raster, regions, or a permutation"),
        ({"order": "raster", "regions": 2}, "regions 2 goes with the order 'regions', not with 'raster'"),
        ({"labels": [3]}, "a label is 3: expected 0 to 2"),
        ({"labels": [0, 1]}, "2 labels: expected one for each of 1 sequences"),
    ],
)
def test_what_images_cannot_be_scored_by_is_named(how, message):
    with pytest.raises(ValueError, match=message):
        log_likelihood(artist(), torch.zeros(4, 6).long(), **how)
    with pytest.raises(ValueError, match="this model knows no classes: expected no labels"):
        log_likelihood(artist(classes=None), torch.zeros(4, 6).long(), labels=[0])


def test_each_order_that_was_trained_on_is_measured():
    class Rows:
        length, given = 25, 1

    names = {orders: [*image_ways(artist(orders), Rows(), samples=1)] for orders in ("raster", "halton=1,regions2=1")}
    assert names["raster"] == [ANY_ORDER, "raster", "raster, 24 steps"]
    assert names["halton=1,regions2=1"][1:] == ["halton", "halton, 24 steps", "regions 2", "regions 2, 6 steps"]
    assert len(image_ways(artist(), Rows(), samples=1)) == 9


# What it is trained on


def test_whether_a_label_is_dropped_says_nothing_about_the_order():
    t, u = noise(8, 25, seed=0, step=0)
    build = objective_of(
        TrainConfig(objective="chain", orders="random=1,halton=1,raster=1,regions=1"), lead=1, grid=(4, 6)
    )
    tokens = torch.randint(5, (8, 25), generator=torch.Generator().manual_seed(0))
    moved = u.clone()
    moved[:, 0] = 1 - moved[:, 0]  # what labels are dropped by
    one, other = (build(tokens, t, draws, torch.ones_like(tokens)) for draws in (u, moved))
    assert torch.equal(one.problems.targets, other.problems.targets)
    assert len(one.answers) == 8 * 24  # the BOS is never predicted
