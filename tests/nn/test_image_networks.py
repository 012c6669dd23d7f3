"""The Partition Transformer for images: classes, registers and rows and columns, with nothing leaking anywhere."""

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from maskless import official
from maskless.nn import blocks
from maskless.nn.attention import rotate
from maskless.nn.blocks import open_gates
from maskless.nn.partition import PartitionConfig, PartitionTransformer, Registers, rotary_grid
from maskless.problems import Offsets, dense, partition, split
from nn.reference import image_logits, random_state
from tiny_networks import check_groups, shaken

CLASSES, CODES = 3, 9
GRID, L = (2, 4), 9
SIZES = {"vocab": 11, "length": L, "width": 16, "heads": 2, "condition": 8, "encoder": 2, "decoder": 2}
SPLITS = [pytest.param([4, 6], id="both groups"), pytest.param([1, 9], id="BOS alone and an empty group")]


def make(**kinds) -> PartitionTransformer:
    """A network whose parameters all differ from their start."""
    torch.manual_seed(0)
    return shaken(PartitionTransformer(PartitionConfig(**SIZES | {"classes": CLASSES, "registers": True} | kinds)), 0.1)


@pytest.fixture(
    params=[{}, {"context": "ordered"}, {"queries": "mean"}, {"grid": GRID, "rope": "2d"}, {"swap": "residual"}],
    ids=["full", "ordered", "mean", "2d", "residual"],
)
def network(request) -> PartitionTransformer:
    return make(**request.param)


def batch(sizes: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens behind a BOS, an order that begins with it, sizes of the first groups, and labels."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(CODES, (len(sizes), L), generator=generator)
    tokens[:, 0] = CODES
    u = torch.rand(len(sizes), L, generator=generator)
    u[:, 0] = -1
    labels = torch.arange(len(sizes)) % (CLASSES + 1)
    return tokens, u.argsort(1), torch.tensor(sizes), labels


@pytest.mark.parametrize("sizes", SPLITS)
def test_a_changed_token_moves_the_logits_of_the_other_group_and_no_others(network, sizes):
    tokens, order, n, labels = batch(sizes)

    def answer(tokens: Tensor) -> tuple[Tensor, Tensor]:
        problems, index = partition(tokens, order, n, labels, given=1)
        return network(problems), index

    check_groups(answer, tokens, order, sizes)


@pytest.mark.parametrize("sizes", SPLITS)
def test_no_gradient_reaches_a_token_or_a_register_from_its_own_group(network, sizes):
    tokens, order, n, labels = batch(sizes)
    problems, _ = partition(tokens, order, n, labels, given=1)
    embedded: list[Tensor] = []
    network.embedding.register_forward_hook(lambda module, args, out: embedded.append(out))
    logits = network(problems)
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
    for problem in range(len(problems)):
        mine = problems.target_offsets.owner == problem
        if not mine.any():
            continue
        inputs = embedded[0], network.registers.weight
        tokens_, registers = torch.autograd.grad((logits * weight)[mine].sum(), inputs, retain_graph=True)
        own = problems.offsets.owner == problem
        assert (tokens_[own] != 0).any(-1).all()
        assert (tokens_[~own] == 0).all()
        holds_bos = problem % 2 == 0
        assert (registers != 0).any(-1).tolist() == [not holds_bos, holds_bos]


@torch.no_grad()
@pytest.mark.parametrize("sizes", SPLITS)
def test_problems_of_a_partition_equal_sampling_problems(network, sizes):
    tokens, order, n, labels = batch(sizes)
    problems, _ = partition(tokens, order, n, labels, given=1)
    logits = network(problems).split(problems.target_offsets.lengths.tolist())
    step, _ = split(tokens, order, n, torch.full_like(n, L))
    torch.testing.assert_close(torch.cat(logits[::2]), network(step.labelled(labels)), atol=1e-5, rtol=0)
    for b, size in enumerate(sizes):
        for number, context, targets in (
            (2 * b, order[b, :size], order[b, size:]),
            (2 * b + 1, order[b, size:], order[b, 1:size]),
        ):
            alone = dense(tokens[b, context][None], context[None], targets[None], labels=labels[b : b + 1])
            torch.testing.assert_close(logits[number], network(alone), atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_changed_label_moves_the_logits_of_its_problem_and_no_others(network):
    tokens, order, n, labels = batch([4, 6, 3])
    problems, _ = partition(tokens, order, n, labels, given=1)
    before = network(problems)
    for problem in range(len(problems)):
        changed = problems.labels.clone()
        changed[problem] = (changed[problem] + 1) % CLASSES
        moved = (network(dataclasses.replace(problems, labels=changed)) != before).any(-1)
        assert torch.equal(moved, problems.target_offsets.owner == problem)


@torch.no_grad()
def test_no_labels_are_dropped_labels(network):
    tokens, order, n, labels = batch([4, 6])
    problems, _ = partition(tokens, order, n, given=1)
    dropped = network(problems.labelled(torch.full_like(labels, CLASSES)))
    torch.testing.assert_close(network(problems), dropped, atol=1e-5, rtol=0)
    assert (network(problems.labelled(labels * 0)) - dropped).abs().max() > 1e-2


@torch.no_grad()
@pytest.mark.parametrize("equal", [False, True])
def test_folded_and_spread_modulations_give_the_same_logits(network, equal):
    tokens, order, n, _ = batch([4, 4] if equal else [4, 6])
    problems, _ = split(tokens, order, n, n + 2)
    assert problems.offsets.equal == equal
    for label in range(CLASSES):
        network.condition.weight[-1] = network.condition.weight[label]  # so that no label at all is this one
        spread_, folded = network(problems.labelled(torch.tensor([label] * 2))), network(problems)
        torch.testing.assert_close(spread_, folded, atol=1e-5, rtol=0)


def test_registers_stand_first_and_tell_contexts_with_bos():
    registers = Registers(2)
    x, lengths = torch.arange(10.0).view(5, 2), torch.tensor([2, 0, 3])
    out, positions, offsets = registers(x, torch.tensor([4, 0, 5, 1, 7]), Offsets.from_lengths(lengths))
    assert offsets.lengths.tolist() == [3, 1, 4]
    assert (offsets.total, offsets.longest, offsets.bounds.dtype) == (8, 4, torch.int32)
    assert positions.tolist() == [1, 6, 2, 0, 0, 7, 3, 9]
    r = registers.weight
    assert torch.equal(out, torch.stack([r[1], x[0], x[1], r[0], r[0], x[2], x[3], x[4]]))


@torch.no_grad()
def test_the_network_gives_the_logits_of_the_released_architecture(tmp_path):
    sizes = {"vocab": 13, "width": 16, "heads": 2, "condition": 16, "encoder": 2, "decoder": 3, "classes": 4}
    state, B, n = random_state(**sizes), 4, 10
    torch.save({"model_state_dict": state, "iter": 7, "global_epoch": 1}, tmp_path / "file.ckpt")
    network = official.read(tmp_path / "file.ckpt", length=n).eval()
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(11, (B, n), generator=generator)
    groups, labels = torch.randint(2, (B, n), generator=generator), torch.tensor([0, 3, 4, 2])
    groups[:, 0] = 0
    groups[-1, 1:] = 1
    expected = image_logits(state, tokens, groups, labels, 2).flatten(0, 1)
    problems, index = partition(tokens, groups.argsort(dim=1, stable=True), (groups == 0).sum(1), labels)
    assert expected.std() > 0.3
    ours = network(problems).double()
    assert (ours[:, 11] == -torch.inf).all()
    predicted = torch.arange(13) != 11
    torch.testing.assert_close(ours[:, predicted], expected[index][:, predicted], atol=1e-4, rtol=0)


def test_closed_gates_open_and_let_a_gradient_through_to_the_class_and_the_registers():
    problems, _ = partition(*batch([4, 6]), given=1)
    for opened in (False, True):
        torch.manual_seed(0)
        network = PartitionTransformer(PartitionConfig(**SIZES, classes=CLASSES, registers=True)).eval()
        if opened:
            open_gates(network)
        network(problems).square().sum().backward()
        layers = [*network.encoder, *network.decoder]
        assert all(layer.mlp.up.weight.grad.any() for layer in layers) == opened
        assert bool(network.registers.weight.grad.any()) == opened
        assert all(layer.modulation.linear.weight.grad.any() for layer in layers) == opened


def test_every_parameter_learns(network):
    logits = network(partition(*batch([4, 6]), given=1)[0])
    logits.logsumexp(-1).sum().backward()
    assert [name for name, p in network.named_parameters() if p.grad is None or not p.grad.any()] == []


def gradients(device: str, compiled: bool) -> list[Tensor]:
    """Of every parameter, in float32, so that attention, sums and fusions must agree."""
    problems, _ = partition(*batch([4, 6]), given=1)
    network = make().to(device)
    if compiled:
        for block in [*network.encoder, *network.decoder]:
            block.compile(fullgraph=True)
    network(problems.to(device)).logsumexp(-1).sum().backward()
    return [p.grad.cpu() for p in network.parameters() if p.grad is not None]


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_layers_give_the_gradients_of_the_cpu(compiled):
    for mine, theirs in zip(gradients("cuda", compiled), gradients("cpu", False), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_a_layer_compiles_to_one_graph_whatever_the_split(monkeypatch):
    def near(x, memory, ends, ropes, **_):  # stands for the packed attention, which only a GPU has
        return x[:, 0] + x.mean() * (x if memory is None else memory).square().mean()

    monkeypatch.setattr(blocks, "rotary_attention", near)
    network, plain = make(), make()
    for block in [*network.encoder, *network.decoder]:
        block.compile(backend="eager", fullgraph=True)
    graphs = torch._dynamo.utils.counters["stats"]
    torch._dynamo.reset()
    counts = []
    with torch.no_grad():
        for sizes in ([4, 6], [3, 8], [1, 9]):
            problems, _ = partition(*batch(sizes), given=1)
            torch.testing.assert_close(network(problems), plain(problems))
            counts.append(graphs["unique_graphs"])
    assert counts[0] == counts[1] == counts[2]


def rotated(table: Tensor, place: int, x: Tensor) -> Tensor:
    return rotate(x[None, None], table[place : place + 1])[0, 0]


def test_two_dimensional_rope_sees_differences_of_rows_and_of_columns():
    rows, columns, before = 4, 5, 3
    table = rotary_grid(rows, columns, 16, before)
    q, k = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    seen: dict[tuple[int, int], float] = {}
    for a in range(rows * columns):
        for b in range(rows * columns):
            apart = a // columns - b // columns, a % columns - b % columns
            score = float(rotated(table, before + a, q) @ rotated(table, before + b, k))
            assert score == pytest.approx(seen.setdefault(apart, score), abs=1e-4)
    scores = sorted(seen.values())
    assert len(seen) == (2 * rows - 1) * (2 * columns - 1)
    assert min(b - a for a, b in itertools.pairwise(scores)) > 1e-5  # no two ways apart look the same
    assert torch.equal(table[0, 0], torch.ones(8))
    assert (table[before, 1] != 0).all()  # the first token has left row 0 and column 0, where BOS is
    assert torch.equal(table[:before], table[:1].expand(before, -1, -1))
    by_row, by_column = table[..., :4], table[..., 4:]
    assert torch.equal(by_row[before + 1], by_row[before + columns - 1])
    assert torch.equal(by_column[before + 1], by_column[before + 1 + columns])


def test_a_network_without_classes_takes_no_labels():
    with pytest.raises(ValueError, match="labels were given to a network without classes"):
        make(classes=None)(partition(*batch([4, 6]), given=1)[0])
