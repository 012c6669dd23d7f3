"""MaskGIT gives the logits of the released architecture, through the same problems as the others."""

import pytest
import torch
from torch import Tensor

from maskless import official
from maskless.nn.blocks import open_gates
from maskless.nn.maskgit import MaskGIT, MaskGITConfig
from maskless.problems import Problems, dense, split
from nn.reference import maskgit_logits, random_maskgit
from tiny_networks import shaken

SIZES = {"vocab": 11, "mask": 10, "length": 9, "classes": 3, "width": 16, "heads": 2, "layers": 2, "hidden": 24}
L, BOS = 9, 11  # BOS is outside the network's vocabulary, as in the released files


def make() -> MaskGIT:
    torch.manual_seed(0)
    return shaken(MaskGIT(MaskGITConfig(**SIZES)), 0.1)


def problem(known: int, *, rows: int = 3, n: int = L, codes: int = 10) -> tuple[Tensor, Tensor, Problems, Tensor]:
    """Each row knows BOS and `known` tokens of the image."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(codes, (rows, n), generator=generator)
    tokens[:, 0] = codes + 1
    u = torch.rand(rows, n, generator=generator)
    u[:, 0] = -1
    start = torch.full((rows,), 1 + known)
    return tokens, u.argsort(1), *split(tokens, u.argsort(1), start, torch.full_like(start, n))


@torch.no_grad()
@pytest.mark.parametrize("known", [0, 5, 15])
def test_the_network_gives_the_logits_of_the_released_architecture(tmp_path, known):
    state = random_maskgit(vocab=13, width=128, places=16, classes=4, blocks=3, hidden=40)
    torch.save({"model_state_dict": state, "iter": 7}, tmp_path / "file.ckpt")
    network = official.read(tmp_path / "file.ckpt").eval()
    assert network.config.grid == (4, 4)
    tokens, order, problems, index = problem(known, n=17, codes=12)
    labels = torch.tensor([0, 4, 2])
    hidden = torch.zeros_like(tokens, dtype=torch.bool).scatter(1, order[:, 1 + known :], True)
    expected = maskgit_logits(state, tokens.masked_fill(hidden, 12)[:, 1:], labels, 2)
    expected = torch.nn.functional.pad(expected, (0, 0, 1, 0)).flatten(0, 1)[index]
    ours = network(problems.labelled(labels)).double()
    assert expected.std() > 0.3
    torch.testing.assert_close(ours[:, :-1], expected[:, :-1], atol=1e-4, rtol=0)
    assert (ours[:, -1] == -torch.inf).all()


@torch.no_grad()
def test_the_order_of_the_context_and_the_bos_do_not_matter():
    tokens, order, problems, _ = problem(4)
    network = make()
    context, targets = order[:, 1:5].flip(1), order[:, 5:]
    again = network(dense(tokens.gather(1, context), context, targets))
    torch.testing.assert_close(network(problems), again, atol=1e-6, rtol=0)


@torch.no_grad()
def test_a_changed_label_moves_the_logits_of_its_problem_and_no_others():
    _, _, problems, _ = problem(4)
    labels, network = torch.tensor([0, 1, 2]), make()
    before = network(problems.labelled(labels))
    for row in range(3):
        changed = labels.clone()
        changed[row] = 3
        moved = (network(problems.labelled(changed)) != before).any(-1)
        assert torch.equal(moved, problems.target_offsets.owner == row)


@torch.no_grad()
def test_no_labels_are_dropped_labels():
    _, _, problems, _ = problem(4)
    network = make()
    dropped = network(problems.labelled(torch.tensor([3, 3, 3])))
    torch.testing.assert_close(network(problems), dropped, atol=1e-5, rtol=0)
    assert (network(problems.labelled(torch.tensor([0, 0, 0]))) - dropped)[:, :-1].abs().max() > 1e-2


def test_every_parameter_learns_and_none_is_stored_twice():
    _, _, problems, _ = problem(4)
    network = make()
    network(problems.labelled(torch.tensor([0, 1, 2])))[:, :-1].logsumexp(-1).sum().backward()
    assert [name for name, p in network.named_parameters() if p.grad is None or not p.grad.any()] == []
    state = network.state_dict()
    assert len({value.data_ptr() for value in state.values()}) == len(state) == len(list(network.parameters()))


def test_gates_open():
    _, _, problems, _ = problem(4)
    torch.manual_seed(0)
    network = MaskGIT(MaskGITConfig(**SIZES)).eval()
    before = float(network.head.linear.weight.detach().std())
    for opened in (False, True):
        if opened:
            open_gates(network)
        network.zero_grad()
        network(problems)[:, :-1].square().sum().backward()
        assert all(block.up.weight.grad.any() for block in network.blocks) == opened
    after = float(network.head.linear.weight.detach().std())
    assert after == pytest.approx(before, rel=0.2)  # also the token vectors: still small


@torch.no_grad()
def test_dropout_acts_in_training_only(monkeypatch):
    _, _, problems, _ = problem(4)
    network = make()
    assert torch.equal(network(problems), network(problems))
    network.train()
    assert not torch.equal(network(problems), network(problems))
    monkeypatch.setattr(torch.nn.functional, "dropout", lambda x, p: x)
    assert not torch.equal(network(problems), network(problems))  # attention has its own


def test_sizes_follow_the_width():
    assert MaskGITConfig(vocab=16_385, mask=16_384, length=1025, classes=1000).inner == 2816
    assert MaskGITConfig(**SIZES | {"hidden": None, "width": 512}).inner == 1536
