"""Distillation: what a student is taught is what its teacher would do, and its optimum is what theory says."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from maskless import logits as lg
from maskless.nn import loss as nn_loss
from maskless.nn.blocks import Head
from maskless.order import arccos
from maskless.problems import Problems, dense
from maskless.train.distill import ARCCOS, UNIFORM, Stride, Teacher, one_group, two_groups
from maskless.train.distill_loss import LOSSES, Linear, divergence
from tiny_networks import Largest

BUILD = {"one": one_group, "two": two_groups}
BOTH = pytest.mark.parametrize("groups", BUILD)
V, L = 3, 2  # of the tables


# Divergences

HAND = {
    "kl-backward": lambda s, q: (s.exp() * (s - q)).nansum(1),
    "kl-forward": lambda s, q: (q.exp() * (q - s)).nansum(1),
    "tv": lambda s, q: (s.exp() - q.exp()).abs().sum(1) / 2,
}


@pytest.mark.parametrize("never", [None, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_a_divergence_and_its_gradients_are_those_of_its_formula(name, never):
    torch.manual_seed(0)
    head, other = (Head(6, 11, 3, never).double() for _ in range(2))
    for parameter in (*head.parameters(), *other.parameters()):
        nn.init.normal_(parameter)
    x, hidden, condition = torch.randn(7, 6).double(), torch.randn(7, 6).double(), torch.randn(1, 3).double()
    weights = torch.tensor([1.0, 0, 2, 1, 1, 0.5, 1])
    linear = Linear.of(other.linear.weight, other.linear.bias, never, torch.float64)
    x.requires_grad_()
    found = divergence(head, x, condition, hidden=hidden, teacher=linear, weights=weights, kind=LOSSES[name], chunk=3)
    learned = [x, *head.parameters()]
    gradients = torch.autograd.grad(3 * found, learned)
    shown = [i for i in range(11) if i != never]
    s, q = (y[:, shown].log_softmax(1) for y in (head(x, condition), other.linear(hidden)))
    expected = (weights * HAND[name](s, q)).sum()
    torch.testing.assert_close(found, expected)
    for one, right in zip(gradients, torch.autograd.grad(3 * expected, learned), strict=True):
        torch.testing.assert_close(one, right)


@pytest.mark.parametrize("name", LOSSES)
def test_products_may_be_rounded_but_a_divergence_is_not(name):
    torch.manual_seed(0)
    head = Head(16, 50, 3)
    nn.init.normal_(head.linear.weight)
    x, condition, ones = torch.randn(9, 16), torch.zeros(1, 3), torch.ones(9)
    with torch.autocast("cpu", torch.bfloat16):
        own, weight, bias = head.operands(x, condition)
        hidden = own + 0.02 * torch.randn_like(own)
        linear = Linear.of(weight, bias, None, torch.bfloat16)
        found = divergence(head, x, condition, hidden=hidden, teacher=linear, weights=ones, kind=LOSSES[name])
    assert found.dtype == torch.float32
    s, q = (((y.bfloat16() @ weight.bfloat16().T).double() + bias).log_softmax(1) for y in (own, hidden))
    # In float32 nine divergences of 0.001, of terms of size 5, err by 9 * 5 eps = 5e-4 of all; in bfloat16 by 8e-3
    assert found.item() == pytest.approx(HAND[name](s, q).sum().item(), rel=2e-3)


@BOTH
def test_the_logits_of_all_targets_are_never_there_at_once(tiny, groups, monkeypatch):
    monkeypatch.setattr(nn_loss, "CHUNK_BYTES", 128 * 512 * 4)
    network = tiny("position", vocab=500)
    teacher, student = Teacher(network), tiny("position", vocab=500)
    tokens, t, u, v = torch.randint(500, (200, 8)), torch.rand(200).double(), *torch.rand(2, 200, 8).double()
    given = t, u, v, torch.ones(200, 8).bool(), Stride(share=0.9, ratio=2)
    lesson = BUILD[groups](tokens, *given)
    with Largest() as largest:
        teacher.loss(LOSSES["kl-backward"], student, teacher(lesson)).backward()
    assert largest.elements == 2 * 128 * 512  # the logits of a chunk, of student and teacher
    assert len(lesson.weights) * 500 > 2 * largest.elements


# When the teacher decides what


def test_the_steps_of_the_teacher_divide_that_of_the_student():
    known = torch.tensor([0.0, 0.5, 0.9, 0.95, 1.0]).double()
    shares = Stride(share=0.1, ratio=2).shares(known)
    expected = [[0, 0.05, 0.1], [0.5, 0.55, 0.6], [0.9, 0.95, 1], [0.95, 0.975, 1], [1, 1, 1]]
    torch.testing.assert_close(shares, torch.tensor(expected).double())


def test_pictures_go_at_the_pace_of_their_sampler():
    done = arccos(torch.tensor([1000]), torch.tensor([20]), torch.zeros(1, 1))[0].cumsum(0)
    progress = torch.arange(1, 21).double() / 20
    assert (1000 * ARCCOS.known(progress) + 1e-6).long().equal(done)
    torch.testing.assert_close(ARCCOS.progress(ARCCOS.known(progress)), progress)


def by_hand(network, tokens, t, u, v, groups, share, ratio, pictures, labels=None):
    """(row, position) -> the teacher's log-probabilities, one sequence and one target at a time."""
    found = {}
    rows, lead = tokens.tolist(), int(pictures)
    for b, row in enumerate(rows):
        a = 1 - math.acos(t[b]) / (math.pi / 2) if pictures else float(t[b])
        when = {i: float(u[b, i]) for i in range(lead, len(row))}
        first = sorted((i for i in when if when[i] < a), key=when.get)
        second = sorted((i for i in when if when[i] >= a), key=when.get)
        problems = [([*range(lead), *first], second, a, 0.0)]
        problems += [(second, first, 1 - a, 1 - a)] if groups == "two" else []
        for context, targets, known, shift in problems:
            r = math.sin(known * math.pi / 2) if pictures else known
            r_end = min(1.0, r + share)
            state = [(i, row[i]) for i in context]
            for step in range(1, ratio + 1):
                r_next = r + (r_end - r) * step / ratio
                level = 1 - math.acos(min(1.0, r_next)) / (math.pi / 2) if pictures else r_next
                open_ = [i for i in targets if (b, i) not in found]
                now = open_ if step == ratio else [i for i in open_ if shift + when[i] < level]
                drawn = []
                for i in now:
                    held = [torch.tensor([[x[k] for x in state]], dtype=torch.long) for k in (1, 0)]
                    label = None if labels is None else labels[b : b + 1]
                    logits = network(dense(*held, torch.tensor([[i]]), labels=label))
                    found[b, i] = logits.log_softmax(1)[0]
                    drawn.append((i, int(lg.draw(logits, v[b, i : i + 1]))))
                state += drawn
    return found


@BOTH
@pytest.mark.parametrize("ratio", [1, 2, 3])
@pytest.mark.parametrize("pictures", [False, True], ids=["text", "pictures"])
@pytest.mark.parametrize("kind", ["position", "ordered", "masked", "classes"])
@pytest.mark.parametrize(("B", "share"), [(6, 0.5), (1, 0.01)])  # the smaller share is one target, or none
def test_targets_are_what_the_teacher_said_when_it_decided(tiny, B, share, kind, groups, ratio, pictures):
    """Of a network whose condition is the class, each problem has the label of its sequence."""
    network = tiny("position", scale=0.3, classes=3, registers=True) if kind == "classes" else tiny(kind, scale=0.3)
    torch.manual_seed(1)
    length, lead, each = 8, int(pictures), 2 if groups == "two" else 1
    tokens, valid = torch.randint(10, (B, length)), torch.rand(B, length) < 0.8
    labels = torch.arange(B) % 4 if kind == "classes" else None
    t, u, v = torch.rand(B).double(), torch.rand(B, length).double(), torch.rand(B, length).double()
    stride = Stride(share=share, ratio=ratio, pace=ARCCOS if pictures else UNIFORM)
    lesson = BUILD[groups](tokens, t, u, v, valid, stride, lead=lead)
    with torch.no_grad():
        expected = by_hand(network, tokens, t, u, v, groups, share, ratio, pictures, labels)
        teacher = Teacher(network)
        taught = teacher(lesson if labels is None else lesson.labelled(labels))
    P = len(teacher.linear.bias)
    found = teacher.linear.logits(taught.hidden, torch.empty(len(taught.hidden), P)).log_softmax(1)
    owner = taught.problems.target_offsets.owner // each
    cells = list(zip(owner.tolist(), taught.problems.targets.tolist(), strict=True))
    assert sorted(cells) == sorted(expected)
    assert len(cells) == (B * (length - lead) if groups == "two" else len(set(cells)))
    assert labels is None or taught.problems.labels.equal(labels.repeat_interleave(each))
    for row, cell, weight in zip(found, cells, taught.weights.tolist(), strict=True):
        seen = expected[cell] > -1e6  # all but a mask
        torch.testing.assert_close(row[: len(seen)][seen], expected[cell][seen], atol=1e-4, rtol=1e-4)
        assert weight == float(valid[cell])


def test_ids_that_are_never_drawn_are_not(tiny):
    network = tiny("position", scale=0.3)
    with torch.no_grad():
        network.head.linear.bias[7] = 30.0
    hidden, u = torch.randn(64, 16), torch.rand(64).double()
    assert (Teacher(network)._draw(hidden, u) == 7).all()
    assert (Teacher(network, never=(7, 10))._draw(hidden, u) < 10).all()
    assert (Teacher(network, never=(7,))._draw(hidden, u) != 7).all()


# An optimum, by enumeration


class Plain(Head):
    """States are logits."""

    def operands(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, torch.eye(V, dtype=x.dtype), torch.zeros(V, dtype=x.dtype)


class Table(nn.Module):
    """Logits for every context of two positions and three ids; a context is a number with a digit for each position."""

    def __init__(self, seed: int, scale: float = 1.0):
        super().__init__()
        torch.manual_seed(seed)
        self.logits = nn.Parameter(scale * torch.randn((V + 1) ** L, L, V, dtype=torch.float64))
        self.head, self.config = Plain(V, V, 1).double(), SimpleNamespace(classes=None)

    def condition(self, labels: Tensor | None = None) -> Tensor:
        return torch.zeros(1, 1)

    def forward(self, problems: Problems, read) -> Tensor:
        digits = (problems.tokens + 1) * (V + 1) ** problems.positions
        state = torch.zeros(len(problems), dtype=torch.long).index_add(0, problems.offsets.owner, digits)
        return read(self.head, self.logits[state[problems.target_offsets.owner], problems.targets], torch.zeros(1, 1))

    def given(self, *known: tuple[int, int]) -> Tensor:
        """log p of each position when (position, token) are known.  -> (L, V)"""
        return self.logits.detach()[sum((x + 1) * (V + 1) ** i for i, x in known)].log_softmax(1)


def two_steps(table: Table) -> Tensor:
    """The distribution of two teacher steps from nothing, each position in either step alike.  -> (V, V)"""
    start, total = table.given().exp(), torch.zeros(V, V, dtype=torch.float64)
    for x, y in itertools.product(range(V), repeat=2):
        apart = start[0, x] * start[1, y]
        left = start[0, x] * table.given((0, x))[1, y].exp()
        right = start[1, y] * table.given((1, y))[0, x].exp()
        total[x, y] = (2 * apart + left + right) / 4
    return total


def kl(p: Tensor, q: Tensor) -> float:
    return float((p * (p / q).log()).sum())


def learned(teacher: Teacher, groups: str) -> Table:
    """A student that began as the teacher, after many lessons in which one step of it is two of the teacher's."""
    student, generator = Table(0, scale=2.0), torch.Generator().manual_seed(0)
    adam = torch.optim.Adam(student.parameters(), lr=0.1)
    t, valid, stride = torch.full((256,), 0.3).double(), torch.ones(256, L).bool(), Stride(share=1.0, ratio=2)
    for step in range(150):
        adam.param_groups[0]["lr"] = 0.1 * (1 - step / 150)
        u, v = torch.rand(2, 256, L, generator=generator, dtype=torch.float64)
        tokens = torch.randint(V, (256, L), generator=generator)
        taught = teacher(BUILD[groups](tokens, t, u, v, valid, stride))
        adam.zero_grad()
        teacher.loss(LOSSES["kl-forward"], student, taught).backward()
        adam.step()
    return student


@BOTH
def test_one_step_of_a_student_recovers_two_steps_of_its_teacher(groups):
    """As far as one step can, which draws positions independently: down to the mutual information of two steps."""
    teacher = Teacher(Table(0, scale=2.0))
    joint = two_steps(teacher.network)
    best = kl(joint, joint.sum(1, keepdim=True) * joint.sum(0, keepdim=True))
    tables = teacher.network, learned(teacher, groups)
    before, after = (kl(joint, torch.outer(*table.given().exp())) for table in tables)
    print(f"KL of one step from two: {before:.4f} before, {after:.4f} after, {best:.4f} at best")
    assert before > best + 0.2
    assert after < best + 0.002
