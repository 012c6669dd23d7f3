"""Products in float8: close to float32, only where they are meant to be, and nowhere without being asked for."""

import pytest
import torch
from torch import Tensor, nn

from maskless.bench.case import DrawCase
from maskless.draw import Truncation
from maskless.engine import Engine, kernels
from maskless.engine.kernels import FLOAT8
from maskless.engine.maps import maps_in
from maskless.logits import row_keys
from maskless.order import COUNTS, ORDERS
from maskless.plans import Plan, plan, plan_causal
from maskless.problems import Problems, split
from maskless.sampling import sample

KINDS = ["position", "ordered", "masked", "causal"]
B, L, V = 4, 24, 200
SIZES = {"vocab": V + 1, "length": L, "width": 64, "heads": 2}
SCALED = ("scaled_linear", "normalise_scaled", "modulate_scaled", "gelu_scaled", "swiglu_scaled")


def planned(kind: str, keys: Tensor, steps: int = 6) -> Plan:
    known = torch.zeros(B, L, dtype=torch.bool)
    if kind == "causal":
        return plan_causal(known, ~known)
    return plan(known, ~known, keys, steps=steps, order=ORDERS["random"], counts=COUNTS["uniform"])


def problems_of(way: Plan, tokens: Tensor, step: int) -> Problems:
    return split(tokens, way.order, way.ends[:, step], way.ends[:, step + 1])[0]


def errors(network: nn.Module, problems: Problems) -> dict[torch.dtype, tuple[float, float]]:
    """Of the logits in each precision: their error as a share of the deviation, and the mean KL divergence."""
    exact = Engine(network, precision=torch.float32).answer(problems).double()
    real, p, found = exact.isfinite(), exact.log_softmax(-1), {}
    for precision in (torch.bfloat16, FLOAT8):
        mine = Engine(network, precision=precision).answer(problems).double()
        kl = torch.where(real, p.exp() * (p - mine.log_softmax(-1)), 0).sum(-1).mean().item()
        found[precision] = ((mine - exact)[real].std() / exact[real].std()).item(), kl
    return found


def pictures(model: str, context: str = "full") -> nn.Module:
    case = DrawCase(model=model, context=context, layers=4, width=64, vocab=100, length=25, classes=3, steps=5)
    return case.network(torch.device("cpu")).eval()


def drawn(network: nn.Module, step: int) -> Problems:
    """A picture each of all labels and of none, some of it known."""
    tokens = torch.randint(100, (4, 26), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = 101
    order = torch.stack([torch.cat([torch.zeros(1, dtype=torch.long), 1 + torch.randperm(25)]) for _ in range(4)])
    problems, _ = split(tokens, order, torch.full((4,), step), torch.full((4,), step + 5))
    return problems.labelled(torch.tensor([0, 1, 2, 3]))


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_rows_are_rounded_by_a_sixteenth_at_most(size):
    x = size * torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    x[7] = 0
    found = kernels.scaled(x)
    assert found.values.dtype == FLOAT8
    assert (found.values.float().abs().amax(1) == torch.where(torch.arange(50) == 7, 0.0, 448.0)).all()
    error = (found.values.float() * found.scales - x).abs()
    assert (error <= x.abs() / 16 + found.scales * 2**-10).all()


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_a_linear_map_is_that_of_the_rounded_numbers(rows):
    torch.manual_seed(0)
    x, weight, bias = kernels.scaled(torch.randn(rows, 32)), kernels.scaled(torch.randn(48, 32)), torch.randn(48)
    whole = [y.values.double() * y.scales.double() for y in (x, weight)]
    for more in (None, bias.bfloat16()):
        found = kernels.scaled_linear(x, weight, more)
        expected = whole[0] @ whole[1].t() + (0 if more is None else more.double())
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), expected, atol=1e-3, rtol=2**-8)


@pytest.mark.parametrize("step", [0, 1, 5])
@pytest.mark.parametrize("kind", ["position", "ordered", "masked"])
def test_logits_of_texts_are_near_those_in_float32(tiny, kind, step):
    keys = row_keys(0, torch.arange(B))
    tokens = torch.randint(V, (B, L), generator=torch.Generator().manual_seed(0))
    found = errors(tiny(kind, scale=0.02, **SIZES), problems_of(planned(kind, keys), tokens, step))
    error, kl = found[FLOAT8]
    assert error < 0.04, found
    assert kl < 1e-3, found
    if step or kind == "masked":  # else nothing is encoded
        assert error != found[torch.bfloat16][0], "rounded as bfloat16 is: nothing was in float8"


@pytest.mark.parametrize("step", [1, 15])
@pytest.mark.parametrize(("model", "context"), [("pgm", "full"), ("pgm", "ordered"), ("maskgit", "full")])
def test_logits_of_pictures_are_near_those_in_float32(model, context, step):
    network = pictures(model, context)
    found = errors(network, drawn(network, step))
    error, kl = found[FLOAT8]
    assert found[torch.bfloat16][0] < error < 0.1, found  # less in wider networks
    assert kl < 2e-3, found


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_float32_where_the_margin_allows(tiny, kind):
    """Also from a cache, and where rows go along with others."""
    network, keys = tiny(kind, scale=0.1, **SIZES), row_keys(0, torch.arange(B))
    way, tokens = planned(kind, keys), torch.zeros(B, L, dtype=torch.long)
    Engine(network, precision=FLOAT8).sample(tokens, way, keys, filter=Truncation(temperature=0))
    wide, apart = 0, 0
    for step in range(way.steps):
        problems, index = split(tokens, way.order, way.ends[:, step], way.ends[:, step + 1])
        with torch.no_grad():
            logits = network(problems)
        first, second = logits.topk(2).values.unbind(1)
        clear = first - second > 0.1 * logits[logits.isfinite() & (logits > -1e9)].std()
        wide += int(clear.sum())
        apart += int((tokens.flatten()[index] != logits.argmax(1))[clear].sum())
    assert apart == 0
    assert wide > 0.3 * tokens.numel()


@pytest.mark.parametrize(
    ("kind", "products"), [("position", 2 * 3 + 1), ("ordered", 2 * 3 + 1), ("masked", 2 * 3), ("causal", 2 * 3)]
)
def test_the_large_products_are_in_float8_when_asked_for_and_none_otherwise(tiny, kind, products, monkeypatch):
    """Of each of two layers that encode three, and the keys and values of the decoder."""
    calls: list[str] = []
    for name in SCALED:
        kernel = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *a, name=name, kernel=kernel: calls.append(name) or kernel(*a))
    network, keys = tiny(kind, **SIZES), row_keys(0, torch.arange(B))
    way = planned(kind, keys)
    for precision in (None, torch.bfloat16, FLOAT8):
        assert calls == []
        Engine(network, precision=precision).sample(torch.zeros(B, L, dtype=torch.long), way, keys)
    assert calls.count("scaled_linear") == products * way.steps
    assert calls.count("gelu_scaled") == 2 * way.steps


def test_what_a_place_cannot_do_it_says(tiny, monkeypatch):
    with pytest.raises(ValueError, match=r"float8 with a matrix of 72 x 24: expected multiples of 16"):
        Engine(tiny("masked", width=24, heads=2), precision=FLOAT8)
    with pytest.raises(ValueError, match="precision float8 on mps: expected cuda, or cpu to try it"):
        maps_in(FLOAT8, torch.device("mps"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"a GPU of compute capability 8.0: expected 8.9 or more"):
        maps_in(FLOAT8, torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert maps_in(FLOAT8, torch.device("cuda")).dtype == torch.bfloat16


def test_in_full_precision_nothing_has_changed(tiny):
    network, keys = tiny("position", scale=0.05, **SIZES), row_keys(0, torch.arange(B))
    way, (mine, plain) = planned("position", keys), torch.zeros(2, B, L, dtype=torch.long)
    Engine(network).sample(mine, way, keys)
    list(sample(network, plain, way, keys, filter=Truncation()))
    assert torch.equal(mine, plain)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [0, 1, 33, 1000])
def test_a_linear_map_on_a_gpu_is_that_of_a_cpu(rows):
    torch.manual_seed(0)
    x, weight, bias = kernels.scaled(torch.randn(rows, 768)), kernels.scaled(torch.randn(2304, 768)), torch.randn(2304)
    there = [kernels.Scaled(y.values.cuda(), y.scales.cuda()) for y in (x, weight)]
    for more in (None, bias.bfloat16()):
        found = kernels.scaled_linear(*there, None if more is None else more.cuda())
        expected = kernels.scaled_linear(x, weight, more)
        torch.testing.assert_close(found.cpu().float(), expected.float(), atol=0.1, rtol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["position", "ordered", "masked"])
def test_logits_on_a_gpu_are_near_those_in_float32(tiny, kind):
    keys, tokens = row_keys(0, torch.arange(B)), torch.randint(V, (B, L), generator=torch.Generator().manual_seed(0))
    network = tiny(kind, scale=0.02, **SIZES).cuda()
    for step in (0, 1, 5):
        error, kl = errors(network, problems_of(planned(kind, keys), tokens, step))[FLOAT8]
        assert error < 0.04
        assert kl < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize(("model", "context"), [("pgm", "full"), ("maskgit", "full")])
def test_logits_of_pictures_on_a_gpu_are_near_those_in_float32(model, context):
    network = pictures(model, context).cuda()
    error, kl = errors(network, drawn(network, 15))[FLOAT8]
    assert error < 0.1
    assert kl < 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_replayed_steps_decide_what_computed_ones_decide(tiny, kind):
    network = tiny(kind, scale=0.05, **SIZES).cuda()
    engine, plain = (Engine(network, precision=FLOAT8, graphs=graphs) for graphs in (True, False))
    for seed in range(4):
        keys = row_keys(seed, torch.arange(B))
        way, (mine, expected) = planned(kind, keys), torch.zeros(2, B, L, dtype=torch.long)
        engine.sample(mine, way, keys)
        plain.sample(expected, way, keys)
        assert torch.equal(mine, expected), seed
