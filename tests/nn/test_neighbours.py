"""What is encoded beside a target joins its first state: of tokens that it may see, and of no others."""

import pytest
import torch

from maskless.drafts import Drafts
from maskless.draw import Truncation
from maskless.engine import backend_of, slots_of
from maskless.logits import row_keys
from maskless.nn.partition import PartitionConfig, PartitionTransformer
from maskless.order import COUNTS, ORDERS
from maskless.plans import Plan, plan, plan_strands
from maskless.problems import chain, dense
from maskless.sampling import Plain, run, take

V, L = 11, 9
KINDS = [(1, "ordered"), (3, "ordered"), (2, "full")]
IMAGE = {"classes": 3, "registers": True, "grid": (2, 4), "condition": 16}
GRID = IMAGE | {"rope": "2d"}


def make(neighbours: int, context: str = "ordered", **more) -> PartitionTransformer:
    torch.manual_seed(0)
    sizes = {"vocab": V, "length": L, "width": 32, "heads": 4, "encoder": 2, "decoder": 2, "dropout": 0.0}
    network = PartitionTransformer(PartitionConfig(**sizes, neighbours=neighbours, context=context, **more)).eval()
    for p in network.parameters():
        torch.nn.init.normal_(p, std=0.25)
    return network.requires_grad_(False)


def orders(rows: int) -> torch.Tensor:
    return torch.rand(rows, L, generator=torch.Generator().manual_seed(1)).argsort(1)


@torch.no_grad()
@pytest.mark.parametrize(("neighbours", "image"), [(1, {}), (3, {}), (0, GRID), (1, GRID), (2, GRID)], ids=str)
def test_a_chain_answers_as_each_prefix_alone(neighbours, image):
    """In a grid a BOS comes first, and is known."""
    network, order, given = make(neighbours, **image), orders(2), int("grid" in image)
    labels = torch.tensor([0, 2]) if image else None
    if given:
        order = torch.cat([torch.zeros(2, 1, dtype=torch.long), 1 + order[:, 1:].argsort(1)], 1)
    tokens = torch.randint(V, (2, L), generator=torch.Generator().manual_seed(2))
    problems, _ = chain(tokens, order, torch.full((2,), given), torch.full((2,), L))
    logits = network(problems.labelled(labels)).view(2, L - given, V)
    for place in range(given, L):
        known, target = order[:, :place], order[:, place : place + 1]
        alone = network(dense(tokens.gather(1, known), known, target).labelled(labels))
        torch.testing.assert_close(logits[:, place - given], alone, atol=1e-4, rtol=0)  # logits up to 10 in float32


def test_neighbours_of_a_cell_stand_above_below_left_and_right_of_it():
    near = make(1, **GRID).neighbours.near  # two registers, a BOS, then two rows of four cells; 11: nowhere
    assert near[:3].tolist() == [[11] * 4] * 3
    assert near[3].tolist() == [11, 7, 11, 4]  # the first cell
    assert near[6].tolist() == [11, 10, 5, 11]  # the end of the first row has nothing to the right of it
    assert near[8].tolist() == [4, 11, 7, 9]
    assert make(3, **GRID).neighbours.near[3].tolist() == [11] * 3 + [7, 11, 11] + [11] * 3 + [4, 5, 6]
    assert make(2).neighbours.near[[0, 4]].tolist() == [[L, L, 1, 2], [2, 3, 5, 6]]


def test_it_is_nothing_at_first_and_learns():
    fresh = PartitionTransformer(PartitionConfig(vocab=V, length=L, width=32, heads=4, neighbours=2))
    assert not fresh.neighbours.linear.weight.any()
    near, plain = make(2).requires_grad_(True), make(0)
    torch.nn.init.zeros_(near.neighbours.linear.weight)
    plain.load_state_dict(near.state_dict(), strict=False)
    problems = dense(torch.tensor([[1, 2]]), torch.tensor([[0, 2]]), torch.tensor([[1, 3]]))
    logits = near(problems)
    assert torch.equal(logits, plain(problems))
    logits.logsumexp(1).sum().backward()
    assert near.neighbours.linear.weight.grad.any()


def sampled(network, backend, *, way: Plan, draft: int = 0, **more) -> torch.Tensor:
    tokens = torch.randint(V, way.order.shape, generator=torch.Generator().manual_seed(3))
    keys = row_keys(0, torch.arange(len(tokens)))
    drafts = Drafts(tokens=tokens, plan=way, keys=keys, filter=Truncation(top_p=0.9), draft=draft, **more)
    run(drafts, backend)
    return drafts.tokens


@pytest.mark.parametrize(("neighbours", "context"), KINDS)
@pytest.mark.parametrize("image", [{}, IMAGE, GRID], ids=["text", "line", "grid"])
@pytest.mark.parametrize("steps", [3, L - 1])
def test_the_engine_decides_what_the_network_decides(neighbours, context, image, steps):
    network, rows = make(neighbours, context, **image), 4
    known = (
        torch.rand(rows, L, generator=torch.Generator().manual_seed(4)) < torch.tensor([0.0, 0.3, 0.3, 0.6])[:, None]
    )
    known[:, 0] = True
    more = {"labels": torch.tensor([0, 1, 2, 0])} if image else {}
    for order in (ORDERS["random"], ORDERS["left"]):
        way = plan(known, ~known, row_keys(1, torch.arange(rows)), steps=min(steps, int((~known).sum(1).max())),
                   order=order, counts=COUNTS["uniform"])  # fmt: skip
        expected = sampled(network, Plain(network), way=way, **more)
        assert torch.equal(sampled(network, backend_of(network), way=way, **more), expected)
    if context == "ordered" and not image:
        alone = Plan(way.order, way.ends).one_by_one()
        expected = sampled(network, Plain(network), way=alone, draft=3)
        assert torch.equal(sampled(network, backend_of(network, draft=3, length=L), way=alone, draft=3), expected)


@pytest.mark.parametrize("confident", [False, True])
@pytest.mark.parametrize("context", ["ordered", "full"])
def test_with_nothing_known_there_are_no_neighbours(context, confident):
    network, unknown = make(2, context), torch.zeros(3, L, dtype=torch.bool)
    way = plan(unknown, ~unknown, row_keys(1, torch.arange(3)), steps=4, order=ORDERS["left"], counts=COUNTS["uniform"])
    expected = sampled(network, Plain(network), way=way, confident=confident)
    assert torch.equal(sampled(network, backend_of(network), way=way, confident=confident), expected)


@pytest.mark.parametrize("neighbours", [1, 3])
def test_rows_that_come_and_go_keep_what_stands_beside(neighbours):
    """In slots, as a server computes them: two drafts of other lengths, of which one joins later."""
    network = make(neighbours)

    def drafts() -> list[Drafts]:
        found = []
        for rows, seed in ((2, 5), (3, 6)):
            known = torch.zeros(rows, L, dtype=torch.bool)
            known[:, :seed] = True
            keys = row_keys(seed, torch.arange(rows))
            way = plan_strands(known, ~known, keys, longest=torch.full((rows, 1), 2), shape=lambda order: order)
            tokens = torch.randint(V, (rows, L), generator=torch.Generator().manual_seed(seed))
            found.append(Drafts(tokens=tokens, plan=way, keys=keys))
        return found

    (one, two), alone = drafts(), drafts()
    backend = slots_of(network, L)
    take([one.ask(one.next())], backend)
    while len(one.next()) or len(two.next()):
        take([x.ask(x.next()) for x in (one, two) if len(x.next())], backend)
    for mine, other in zip((one, two), alone, strict=True):
        run(other, Plain(network))
        assert torch.equal(mine.tokens, other.tokens)
