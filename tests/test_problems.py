"""Problems are exactly the contexts and targets that were asked for, however they are packed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maskless.problems import Offsets, Problems, dense, partition, split


def rows(values, offsets: Offsets) -> list[list[int]]:
    return [part.tolist() for part in values.split(offsets.lengths.tolist())]


def batch(sizes: list[int], L: int, seed: int = 0):
    """Tokens that name their row and position, and a random order of the positions of each row."""
    tokens = 100 * torch.arange(len(sizes))[:, None] + torch.arange(L)
    order = torch.rand(len(sizes), L, generator=torch.Generator().manual_seed(seed)).argsort(1)
    return tokens, order, torch.tensor(sizes)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_offsets_say_where_every_element_stands(lengths):
    offsets = Offsets.from_lengths(torch.tensor(lengths))
    places = [(s, i) for s, n in enumerate(lengths) for i in range(n)]
    assert len(offsets) == len(lengths)
    assert offsets.lengths.tolist() == lengths
    assert (offsets.total, offsets.longest) == (sum(lengths), max(lengths))
    assert offsets.equal == (len(set(lengths)) == 1)
    assert list(zip(offsets.owner.tolist(), offsets.within.tolist(), strict=True)) == places
    assert offsets.slots.tolist() == [s * max(lengths) + i for s, i in places]
    assert offsets.real.tolist() == [[i < n for i in range(max(lengths))] for n in lengths]


def test_while_a_graph_is_traced_nothing_is_kept(monkeypatch):
    offsets = Offsets.from_lengths(torch.tensor([2, 0, 1]))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert offsets.owner.tolist() == [0, 0, 2]
    assert "owner" not in vars(offsets)


@pytest.mark.parametrize(("segments", "length"), [(3, 4), (1, 1), (2, 0)])
def test_regular_offsets_equal_those_of_equal_lengths(segments, length):
    regular, ragged = Offsets.regular(segments, length), Offsets.from_lengths(torch.full((segments,), length))
    assert regular.equal
    assert ragged.equal
    assert torch.equal(regular.bounds, ragged.bounds)
    assert (regular.total, regular.longest) == (ragged.total, ragged.longest)


@pytest.mark.parametrize("given_", [0, 2])
@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(0, 99))
def test_each_group_of_a_partition_predicts_the_other_but_for_what_is_given(given_, sizes, seed):
    L, sizes = 6, [max(given_, size) for size in sizes]
    tokens, order, n = batch(sizes, L, seed)
    problems, index = partition(tokens, order, n, given=given_)
    contexts, known = rows(problems.positions, problems.offsets), rows(problems.tokens, problems.offsets)
    targets = rows(problems.targets, problems.target_offsets)
    for b, size in enumerate(sizes):
        first, second = order[b, :size].tolist(), order[b, size:].tolist()
        assert contexts[2 * b : 2 * b + 2] == [first, second]
        assert targets[2 * b : 2 * b + 2] == [second, first[given_:]]
        assert known[2 * b : 2 * b + 2] == [tokens[b, first].tolist(), tokens[b, second].tolist()]
    assert len(index) == len(problems.targets) == len(sizes) * (L - given_)
    row_of_target = problems.target_offsets.owner // 2
    assert torch.equal(tokens.flatten()[index], 100 * row_of_target + problems.targets)


@pytest.mark.parametrize("sizes", [[0, 6], [3, 3], [1, 5]])
def test_the_shapes_of_a_partition_do_not_depend_on_the_split(sizes):
    problems, index = partition(*batch(sizes, 6))
    assert len(problems.tokens) == len(problems.positions) == len(problems.targets) == len(index) == 12
    assert sorted(index.tolist()) == list(range(12))
    for offsets in (problems.offsets, problems.target_offsets):
        assert (len(offsets), offsets.total, offsets.longest, offsets.equal) == (4, 12, 6, False)


@pytest.mark.parametrize("lengths", [[2, 0, 3], [4, 4]])
def test_grown_offsets_hold_one_more_element_in_each_segment(lengths):
    grown = Offsets.from_lengths(torch.tensor(lengths)).grown()
    expected = Offsets.from_lengths(torch.tensor(lengths) + 1)
    assert torch.equal(grown.bounds, expected.bounds)
    assert grown.bounds.dtype == torch.int32
    assert (grown.total, grown.longest, grown.equal) == (expected.total, expected.longest, expected.equal)


def test_labels_go_to_all_problems_of_their_sequence():
    tokens, order, n = batch([2, 4], 6)
    both, _ = partition(tokens, order, n)
    assert both.labels is None
    for problems in (both.labelled(torch.tensor([7, 9])), partition(tokens, order, n, labels=torch.tensor([7, 9]))[0]):
        assert problems.labels.tolist() == [7, 7, 9, 9]
    one, _ = split(tokens, order, n, n + 1)
    assert one.labelled(torch.tensor([7, 9])).labels.tolist() == [7, 9]
    assert one.labelled(torch.tensor([7, 9])).labelled(None).labels is None
    with pytest.raises(ValueError, match="3 labels for 4 problems: expected one for each sequence"):
        both.labelled(torch.tensor([1, 2, 3]))


def test_a_split_knows_the_first_positions_of_the_order_and_predicts_the_next():
    tokens, order, starts = batch([0, 2, 5], 6)
    ends = torch.tensor([1, 2, 6])
    problems, index = split(tokens, order, starts, ends)
    expected = [order[b, :s].tolist() for b, s in enumerate(starts)]
    assert rows(problems.positions, problems.offsets) == expected
    assert rows(problems.tokens, problems.offsets) == [tokens[b, p].tolist() for b, p in enumerate(expected)]
    wanted = [order[b, s:e].tolist() for b, (s, e) in enumerate(zip(starts, ends, strict=True))]
    assert rows(problems.targets, problems.target_offsets) == wanted
    assert tokens.flatten()[index].tolist() == [int(tokens[b, p]) for b, part in enumerate(wanted) for p in part]


def test_a_dense_row_knows_its_first_tokens_only():
    tokens, positions = torch.arange(12).view(3, 4), torch.arange(12).flip(0).view(3, 4) % 5
    targets = torch.tensor([[0, 1], [2, 3], [4, 4]])
    ragged = dense(tokens, positions, targets, torch.tensor([4, 0, 1]), labels=torch.tensor([1, 2, 3]))
    assert rows(ragged.tokens, ragged.offsets) == [[0, 1, 2, 3], [], [8]]
    assert rows(ragged.positions, ragged.offsets) == [positions[0].tolist(), [], [int(positions[2, 0])]]
    assert rows(ragged.targets, ragged.target_offsets) == targets.tolist()
    assert ragged.labels.tolist() == [1, 2, 3]
    whole = dense(tokens, positions, targets)
    assert rows(whole.tokens, whole.offsets) == tokens.tolist()
    assert whole.offsets.equal


def test_mapping_changes_every_tensor_and_nothing_else():
    problems, _ = partition(*batch([2, 4], 6), labels=torch.tensor([7, 9]))
    doubled = problems.map(lambda x: x * 2)
    for name in ("tokens", "positions", "targets", "labels"):
        assert torch.equal(getattr(doubled, name), 2 * getattr(problems, name))
    for name in ("offsets", "target_offsets"):
        before, after = getattr(problems, name), getattr(doubled, name)
        assert torch.equal(after.bounds, 2 * before.bounds)
        assert (after.total, after.longest, after.equal) == (before.total, before.longest, before.equal)


@pytest.mark.gpu
def test_problems_move_to_a_device_whole():
    problems, _ = partition(*batch([2, 4], 6), labels=torch.tensor([7, 9]))
    moved: Problems = problems.to("cuda")
    for name in ("tokens", "positions", "targets", "labels"):
        assert getattr(moved, name).is_cuda
        assert torch.equal(getattr(moved, name).cpu(), getattr(problems, name))
    assert moved.offsets.slots.is_cuda
    assert torch.equal(moved.target_offsets.bounds.cpu(), problems.target_offsets.bounds)


def test_values_are_ranked_within_their_segments():
    """As a plain sort of each segment does, empty ones and equal values among them."""
    generator = torch.Generator().manual_seed(0)
    for lengths in ([3], [0, 4, 1, 0, 7], [2, 2, 2], [0]):
        offsets = Offsets.from_lengths(torch.tensor(lengths))
        values = torch.randint(3, (offsets.total,), generator=generator).double()
        places = torch.arange(offsets.total).split(lengths)
        expected = [place[values[place].argsort(descending=True, stable=True)] for place in places]
        assert torch.equal(offsets.ranked(values), torch.cat(expected))
