"""The masked transformer: full length with mask ids, the released MDLM's logits at the targets."""

import pytest
import torch

from maskless import official
from maskless.nn.masked import MaskedConfig, MaskedTransformer
from maskless.problems import dense, split
from nn.reference import masked_logits, random_state


def problem(known: int, n: int = 8, vocab: int = 10, rows: int = 3):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocab, (rows, n), generator=generator)
    order = torch.rand(rows, n, generator=generator).argsort(1)
    start = torch.full((rows,), known)
    return tokens, order, split(tokens, order, start, torch.full_like(start, n))


@torch.no_grad()
@pytest.mark.parametrize("known", [0, 1, 5, 7])
def test_the_order_of_the_context_does_not_matter(tiny, known):
    tokens, order, (problems, _) = problem(known)
    context, targets = order[:, :known].flip(1), order[:, known:]
    again = dense(tokens.gather(1, context), context, targets)
    network = tiny("masked")
    torch.testing.assert_close(network(problems), network(again), atol=1e-6, rtol=0)


@torch.no_grad()
def test_an_unasked_position_is_a_mask_like_any_other(tiny):
    tokens, order, _ = problem(3)
    context, targets, network = order[:, :3], order[:, 3:], tiny("masked")
    all_ = network(dense(tokens.gather(1, context), context, targets)).unflatten(0, targets.shape)
    some = network(dense(tokens.gather(1, context), context, targets[:, 1:3])).unflatten(0, (3, 2))
    torch.testing.assert_close(all_[:, 1:3], some, atol=1e-6, rtol=0)


@torch.no_grad()
def test_the_mask_is_never_predicted(tiny):
    logits = tiny("masked")(problem(3)[2][0])
    assert (logits[:, -1] == -torch.inf).all()
    assert logits[:, :-1].isfinite().all()


@torch.no_grad()
def test_a_new_network_predicts_nothing_yet():
    network = MaskedTransformer(MaskedConfig(vocab=11, mask=10, length=8, width=16, heads=2, layers=2, condition=8))
    assert (network(problem(3)[2][0])[:, :-1] == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": 11}, "mask id 11 is outside the vocabulary of 11"),
        ({"heads": 3}, "width 16 does not split into 3 heads"),
    ],
)
def test_contradictory_sizes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        MaskedConfig(**{"vocab": 11, "mask": 10, "length": 8, "width": 16, "heads": 2} | change)


@torch.no_grad()
@pytest.mark.parametrize("known", [0, 4, 11])
@pytest.mark.parametrize(
    "sizes",
    [
        {"vocab": 13, "width": 16, "heads": 2, "condition": 8, "blocks": 2},
        {"vocab": 9, "width": 32, "heads": 4, "condition": 16, "blocks": 4},
    ],
    ids=["2 blocks", "4 blocks"],
)
def test_the_network_gives_the_logits_of_the_released_architecture(tmp_path, known, sizes):
    state, n = random_state(**sizes), 12
    torch.save({"state_dict": {f"backbone.{name}": value for name, value in state.items()}}, tmp_path / "file.ckpt")
    network = official.read(tmp_path / "file.ckpt", weights="raw", length=n).eval()
    tokens, order, (problems, index) = problem(known, n, sizes["vocab"] - 1)
    hidden = torch.zeros_like(tokens, dtype=torch.bool).scatter(1, order[:, known:], True)
    masked = tokens.masked_fill(hidden, sizes["vocab"] - 1)
    expected = masked_logits(state, masked, sizes["heads"]).flatten(0, 1)[index]
    assert expected.std() > 0.3
    torch.testing.assert_close(network(problems)[:, :-1].double(), expected[:, :-1], atol=1e-4, rtol=0)


def test_a_network_of_unknown_length_lays_problems_out_as_far_as_they_reach():
    sizes = {"vocab": 11, "mask": 10, "width": 16, "heads": 2, "layers": 2, "condition": 8}
    torch.manual_seed(0)
    known = MaskedTransformer(MaskedConfig(length=12, **sizes)).eval()
    for parameter in known.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    unknown = MaskedTransformer(MaskedConfig(length=64, always_full=False, **sizes)).eval()
    unknown.load_state_dict(known.state_dict())
    tokens, positions, targets = torch.tensor([[1, 2, 10]]), torch.tensor([[0, 4, 7]]), torch.tensor([[1, 11]])
    problems = dense(tokens, positions, targets)
    torch.testing.assert_close(unknown(problems), known(problems))
    shorter = dense(tokens, positions, torch.tensor([[1, 5]]))
    assert not torch.allclose(unknown(shorter)[:, :10], known(shorter)[:, :10])
