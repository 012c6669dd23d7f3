"""The loss by chunks is the cross-entropy of the logits, value and gradients, and the logits are never all there."""

import os
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from maskless.nn import loss as module
from maskless.nn.blocks import Head
from maskless.nn.loss import CHUNK_BYTES, chunk_size, cost, costs, total_cost, weighted_cross_entropy
from maskless.objective import OBJECTIVES, noise
from objective_tasks import loss
from tiny_networks import Largest

U, D, V = 13, 6, 70  # neither the targets nor the vocabulary fill their last chunk or row
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def problem(dtype=torch.float64, device=CPU, never: int | None = None, U=U, D=D, V=V) -> dict[str, Tensor | int | None]:
    g = torch.Generator().manual_seed(0)
    answers = torch.randint(V, (U,), generator=g)
    unlikely = answers == (-1 if never is None else never)
    return {
        "hidden": (torch.randn(U, D, generator=g).double() / D**0.5).to(device, dtype).requires_grad_(),
        "weight": torch.randn(V, D, generator=g).double().to(device, dtype).requires_grad_(),
        "bias": torch.randn(V, generator=g).double().to(device, dtype).requires_grad_(),
        "answers": torch.where(unlikely, (answers + 1) % V, answers).to(device),
        "weights": torch.rand(U, generator=g).to(device),
        "never": never,
    }


def by_logits(hidden, weight, bias, answers, weights, never) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    if never is not None:
        logits = logits.masked_fill(torch.arange(len(weight), device=logits.device) == never, -torch.inf)
    return (weights * F.cross_entropy(logits, answers, reduction="none")).sum()


def with_gradients(function, inputs, **more) -> list[Tensor]:
    """The value, and the gradients for all inputs that want one."""
    value = function(**inputs, **more)
    wanted = [x for x in inputs.values() if isinstance(x, Tensor) and x.requires_grad]
    return [value.detach(), *torch.autograd.grad(value, wanted)]


def same(ours: Sequence[Tensor], expected: Sequence[Tensor], **tolerance) -> None:
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("chunk", [None, 1, 5, 13, 64])
@pytest.mark.parametrize("never", [None, 0, V - 1])
def test_value_and_gradients_are_those_of_the_logits_whatever_the_chunks(never, chunk):
    for inputs in (problem(never=never), problem(never=never) | {"bias": None}):
        ours = with_gradients(weighted_cross_entropy, inputs, chunk=chunk)
        same(ours, with_gradients(by_logits, inputs))
        with torch.no_grad():
            assert weighted_cross_entropy(**inputs, chunk=chunk) == ours[0]


@pytest.mark.parametrize("V", [1, 64, 65, 300])
def test_any_vocabulary_will_do_also_in_float32(V):
    inputs = problem(torch.float32, V=V)
    ours, expected = with_gradients(weighted_cross_entropy, inputs, chunk=4), with_gradients(by_logits, inputs)
    same(ours, expected, rtol=1e-5, atol=1e-5)


def test_an_id_that_never_comes_has_no_probability_and_no_gradient():
    inputs = problem(never=3)
    value, _, weight, bias = with_gradients(weighted_cross_entropy, inputs)
    assert (weight[3] == 0).all()
    assert bias[3] == 0
    with torch.no_grad():
        inputs["weight"][3], inputs["bias"][3] = 1e3, 1e3
    assert weighted_cross_entropy(**inputs) == value
    assert weighted_cross_entropy(**inputs | {"answers": torch.full((U,), 3)}) == torch.inf


def test_a_target_of_weight_0_adds_nothing_even_if_its_answer_never_comes():
    inputs = problem(never=3)
    some = torch.arange(U) % 3 > 0
    hidden = inputs["hidden"]
    fewer = inputs | {name: inputs[name][some] for name in ("answers", "weights")}
    fewer["hidden"] = hidden.detach()[some].requires_grad_()
    padded = inputs | {"answers": inputs["answers"].where(some, 3), "weights": inputs["weights"].where(some, 0)}
    value, d_hidden, *others = with_gradients(weighted_cross_entropy, padded, chunk=5)
    assert (d_hidden[~some] == 0).all()
    same([value, d_hidden[some], *others], with_gradients(weighted_cross_entropy, fewer, chunk=5))


def test_no_targets_cost_nothing():
    ours = with_gradients(weighted_cross_entropy, problem(U=0))
    assert [tuple(x.shape) for x in ours] == [(), (0, D), (V, D), (V,)]
    assert all((x == 0).all() for x in ours)


def test_the_gradients_are_scaled_by_what_comes_in_and_may_be_asked_for_again():
    inputs = problem()
    plain = with_gradients(weighted_cross_entropy, inputs)[1:]
    value = 3 * weighted_cross_entropy(**inputs)
    wanted = [inputs[name] for name in ("hidden", "weight", "bias")]
    for _ in range(2):
        same(list(torch.autograd.grad(value, wanted, retain_graph=True)), [3 * x for x in plain])


def test_products_in_bfloat16_are_summed_in_float32():
    """One chunk per target: sums of U parts in bfloat16 would be off by far more."""
    inputs = problem(torch.float32, U=400)
    rounded = {name: x.detach().bfloat16().double().requires_grad_() for name, x in list(inputs.items())[:3]}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = with_gradients(weighted_cross_entropy, inputs, chunk=1)
    assert {x.dtype for x in ours} == {torch.float32}
    for one, other in zip(ours, with_gradients(by_logits, inputs | rounded), strict=True):
        assert (one - other).norm() < 5e-3 * other.norm()


def test_the_logits_are_never_all_there():
    inputs, chunk = problem(torch.float32, U=512, V=640), 32
    with Largest() as plain:
        with_gradients(by_logits, inputs)
    assert plain.elements == 512 * 640
    with Largest() as lean:
        with_gradients(weighted_cross_entropy, inputs, chunk=chunk)
    assert lean.elements == chunk * 640


def test_the_costs_of_each_answer_are_those_of_the_logits_and_the_logits_are_never_all_there(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", 1)
    torch.manual_seed(0)
    head = Head(8, 640, 4, never=3)
    torch.nn.init.normal_(head.linear.weight)
    x, condition, answers = torch.randn(512, 8), torch.randn(1, 4), torch.randint(4, 640, (512,))
    with Largest() as lean:
        each = module.costs_each(head, x, condition, answers=answers)
    assert lean.elements == 128 * 640
    plain = F.cross_entropy(head(x, condition), answers, reduction="none")
    torch.testing.assert_close(each, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("vocab", [11, 8_192, 50_257, 10**9])
@pytest.mark.parametrize("targets", [0, 1, 128, 5_000, 32_768])
def test_chunks_are_whole_tiles_of_a_bounded_size_and_about_equal(targets, vocab):
    size = chunk_size(targets, vocab, torch.bfloat16)
    assert size % 128 == 0
    assert size == 128 or size * vocab * 2 <= CHUNK_BYTES
    chunks = -(-targets // size)
    assert chunks * size - targets < 128 * max(1, chunks)


# Heads and networks


@pytest.mark.parametrize("never", [None, 4])
def test_the_gradient_reaches_everything_that_is_folded_into_the_head(never):
    torch.manual_seed(0)
    head = Head(D, V, 5, never)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x, condition = torch.randn(U, D, requires_grad=True), torch.randn(1, 5, requires_grad=True)
    answers, weights = torch.arange(5, 5 + U), torch.rand(U)
    wanted = [x, condition, *head.parameters()]
    assert len(wanted) == 2 + 5  # norm, linear and modulation
    ours = cost(head, x, condition, answers=answers, weights=weights)
    expected = (weights * F.cross_entropy(head(x, condition), answers, reduction="none")).sum()
    torch.testing.assert_close(ours, expected)
    same(torch.autograd.grad(ours, wanted), torch.autograd.grad(expected, wanted), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["position", "mean", "logsumexp", "ordered", "masked", "causal"])
def test_a_network_that_reads_its_cost_has_the_loss_and_the_gradients_of_its_logits(tiny, kind):
    network = tiny(kind)
    t, u = noise(6, 8, seed=0, step=0)
    tokens = torch.randint(10, (6, 8), generator=torch.Generator().manual_seed(0))
    name = {"masked": "mdlm", "causal": "causal"}.get(kind, "pgm")
    task = OBJECTIVES[name](tokens, t, u, tokens != 3)
    ours = total_cost(network, task.problems, task.answers, task.weights)
    expected, parameters = loss(network, task), list(network.parameters())
    torch.testing.assert_close(ours, expected)
    same(torch.autograd.grad(ours, parameters), torch.autograd.grad(expected, parameters), rtol=1e-4, atol=1e-5)


# The kernel


def kernel_and_plain_agree(device: torch.device, dtype: torch.dtype, V: int, never: int | None) -> None:
    from maskless.nn import cuda

    g = torch.Generator().manual_seed(0)
    padded = -(-V // 64) * 64
    x = (5 * torch.randn(9, padded, generator=g)).to(device, dtype)
    answers, weights = torch.randint(V, (9,), generator=g).to(device), torch.rand(9, generator=g).to(device)
    answers[0], answers[1], weights[2], answers[2] = 0, V - 1, 0, 3  # the edges, and padding
    if never is not None:
        answers = torch.where((answers == never) & (weights > 0), 1, answers)
    mine, theirs = x.clone(), x.clone()
    found = cuda.costs(mine, answers, weights, V, never, gradients=True)
    expected = costs(theirs, answers, weights, V, never, gradients=True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine, theirs, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)
    assert cuda.costs(x, answers, weights, V, never, gradients=False).equal(found)
    assert (found[2], mine[2].abs().max(), mine[:, V:].abs().sum()) == (0, 0, 0)


KERNELS = [(dtype, V, n) for dtype in (torch.float32, torch.bfloat16) for V, n in ((70, None), (70, 3), (20_000, 3))]


@pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="set TRITON_INTERPRET=1 where Triton is installed")
@pytest.mark.parametrize(("dtype", "V", "never"), KERNELS)
def test_the_kernel_interpreted_gives_what_plain_torch_gives(dtype, V, never):
    pytest.importorskip("triton")
    kernel_and_plain_agree(CPU, dtype, V, never)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "V", "never"), KERNELS)
def test_the_kernel_gives_what_plain_torch_gives(dtype, V, never):
    kernel_and_plain_agree(CUDA, dtype, V, never)


@pytest.mark.gpu
@pytest.mark.parametrize("with_kernel", [True, False])
@pytest.mark.parametrize("never", [None, 5])
def test_on_a_gpu_products_are_in_bfloat16_and_sums_in_float32(never, with_kernel, monkeypatch):
    if not with_kernel:
        monkeypatch.setattr(module, "_costs_on", lambda device: costs)
    inputs = problem(torch.float32, CUDA, never, U=1000, D=64, V=1000)
    rounded = {name: x.detach().bfloat16().double().requires_grad_() for name, x in list(inputs.items())[:3]}
    expected = with_gradients(by_logits, inputs | rounded)
    for chunk in (None, 128, 300):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            ours = with_gradients(weighted_cross_entropy, inputs, chunk=chunk)
        assert {x.dtype for x in ours} == {torch.float32}
        for one, other in zip(ours, expected, strict=True):
            assert (one - other).norm() < 1e-2 * other.norm()


@pytest.mark.gpu
def test_on_a_gpu_the_memory_is_that_of_a_chunk():
    inputs = problem(torch.float32, CUDA, U=32_768, D=64, V=50_257)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        with_gradients(weighted_cross_entropy, inputs)
    assert torch.cuda.max_memory_allocated() - before < CHUNK_BYTES + 2**27
