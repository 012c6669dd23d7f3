"""Counted operations are those that torch counts on the real networks, and give the limits that we compare with."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from maskless import flops, order
from maskless.bench.case import DrawCase, SampleCase
from maskless.draw import Guidance, Truncation, constant
from maskless.engine import Engine
from maskless.logits import row_keys
from maskless.plans import Plan, plan, plan_causal
from maskless.problems import Problems, dense
from maskless.sampling import sample

B, L, K = 3, 8, 4
PGM_8_8, PGM_12_12, MASKGIT = SampleCase(), DrawCase(), DrawCase(model="maskgit")
CEILING, BANDWIDTH = 790e12, 4.3e12  # of an H200, as the limits that we check against were computed


def planned(rows: int = B, length: int = L, steps: int = K, counts: order.Counts = order.uniform) -> Plan:
    known = torch.zeros(rows, length, dtype=torch.bool)
    return plan(known, ~known, row_keys(0, torch.arange(rows)), steps=steps, order=order.random, counts=counts)


def counted(work: Callable[[], object]) -> int:
    """What torch counts; attention as two plain products, because that is the kind it knows on a CPU."""
    in_place = {torch.ops.aten.addmm_: lambda x, a, b, **_: 2 * a[0] * a[1] * b[1]}  # which it leaves out
    counter = FlopCounterMode(display=False, custom_mapping=in_place)
    with sdpa_kernel(SDPBackend.MATH), counter, torch.no_grad():
        work()
    return counter.get_total_flops()


def constants(network: nn.Module) -> int:
    """Of a call: the condition, the modulations, and the shifts folded into biases. The engine computes them once."""
    c = network.config
    D, C = c.width, c.condition
    self_block, cross_block = 2 * C * 6 * D + 2 * D * 7 * D, 2 * C * 6 * D + 2 * D * 5 * D
    blocks = getattr(c, "layers", getattr(c, "encoder", 0)) * self_block + getattr(c, "decoder", 0) * cross_block
    return 2 * 256 * C + 2 * C * C + blocks + 2 * C * 2 * D + 2 * D * c.vocab


def queries(network: nn.Module, targets: int) -> int:
    """GroupSwap's queries, which the engine has in a table."""
    return 2 * targets * network.config.width**2


def run(network: nn.Module, plan: Plan) -> None:
    tokens, keys = torch.zeros(plan.order.shape, dtype=torch.long), row_keys(0, torch.arange(len(plan.order)))
    for _ in sample(network, tokens, plan, keys, filter=Truncation()):
        pass


@pytest.mark.parametrize("kind", ["position", "masked"])
def test_sampling(tiny, kind):
    network, steps = tiny(kind), planned()
    ours = flops.sampling(network.config, steps) + K * constants(network)
    ours += queries(network, B * L) if kind == "position" else 0
    assert counted(lambda: run(network, steps)) == ours


def test_sampling_of_mdlm_with_the_head_everywhere(tiny):
    """As if every position were a target in every step."""
    network, steps = tiny("masked"), planned()
    positions = torch.arange(L).expand(B, L)
    known = torch.zeros(B, 0, dtype=torch.long)
    everywhere = counted(lambda: network(dense(known, known, positions))) - constants(network)
    assert flops.sampling_everywhere(network.config, steps) == K * everywhere


@pytest.mark.parametrize(
    ("kind", "refresh"), [("position", 1), ("position", 3), ("ordered", 1), ("masked", 1), ("causal", 1)]
)
def test_the_engine_does_what_is_counted(tiny, kind, refresh):
    """And with a cache hardly more: the tokens of one step are masked from one another, not left out."""
    network = tiny(kind, length=32, width=64, vocab=64)
    known, keys = torch.zeros(B, 32, dtype=torch.bool), row_keys(0, torch.arange(B))
    steps = plan_causal(known, ~known) if kind == "causal" else planned(length=32, steps=8)
    engine, tokens = Engine(network), torch.zeros(B, 32, dtype=torch.long)
    done = counted(lambda: engine.sample(tokens, steps, keys, refresh=refresh))
    assert done == pytest.approx(flops.sampling(network.config, steps, refresh), rel=0.002 if kind == "ordered" else 0)


def drawn(case: DrawCase, rows: int) -> Plan:
    known = torch.zeros(rows, 1 + case.length, dtype=torch.bool)
    known[:, 0] = True
    way, counts = order.after_lead(order.halton(case.grid), 1), order.COUNTS[case.counts]
    return plan(known, ~known, row_keys(0, torch.arange(rows)), steps=case.steps, order=way, counts=counts)


@pytest.mark.parametrize(
    "guidance", [None, Guidance(weight=2.0, dropped=5), Guidance(weight=1.0, dropped=5, schedule=constant)]
)
@pytest.mark.parametrize(("model", "context"), [("pgm", "full"), ("pgm", "ordered"), ("maskgit", "full")])
def test_the_engine_draws_with_what_is_counted(model, context, guidance):
    """But for the modulations, once for a run, and with a cache for what the step without a weight decides."""
    case = DrawCase(model=model, context=context, layers=4, width=64, vocab=64, length=36, steps=6, classes=5)
    steps, keys, network = drawn(case, B), row_keys(0, torch.arange(B)), case.network(torch.device("cpu")).eval()
    weights = torch.zeros(B, 6) if guidance is None else guidance.weights(steps)
    engine, tokens = Engine(network), torch.zeros(B, 37, dtype=torch.long)
    labels = torch.arange(B)
    done = counted(lambda: engine.sample(tokens, steps, keys, labels=labels, guidance=guidance))
    conditions = engine.backbone.norms
    done -= 2 * (B if guidance is None else B + 1) * conditions.weight.numel()
    head = 64 - case.config.vocab % 64  # rows that fill the head up
    done -= 2 * head * 64 * (B * 36 + int((steps.ends.diff(dim=1) * (weights > 0)).sum()))
    ours = flops.sampling(case.config, steps, weights=weights)
    assert done == pytest.approx(ours, rel=0.03 if context == "ordered" else 0)


def problems(n: int, k: int) -> Problems:
    place = torch.stack([torch.randperm(n + k) for _ in range(B)])
    return dense(torch.zeros(B, n, dtype=torch.long), place[:, :n], place[:, n:])


@pytest.mark.parametrize(("n", "k"), [(3, 5), (7, 1), (1, 7)])
@pytest.mark.parametrize("kind", ["position", "ordered", "masked"])
def test_training(tiny, kind, n, k):
    network, task = tiny(kind), problems(n, k)
    ours = flops.training(network.config, task) + constants(network)
    if kind == "ordered":  # torch counts what a causal mask leaves out, too
        left_out = B * (n * n - n * (n + 1) // 2)
        ours += network.config.encoder * 4 * left_out * network.config.width
    assert counted(lambda: network(task)) == ours


def test_a_causal_network_computes_each_position_once_in_training_and_in_sampling(tiny):
    network = tiny("causal")
    places, known = torch.arange(L).expand(B, L), torch.zeros(B, L, dtype=torch.bool)
    task = dense(torch.zeros(B, L - 1, dtype=torch.long), places[:, :-1], places)
    left_out = network.config.layers * 4 * B * (L * L - L * (L + 1) // 2) * network.config.width
    ours = flops.training(network.config, task)
    assert counted(lambda: network(task)) == ours + constants(network) + left_out
    assert flops.sampling(network.config, plan_causal(known, ~known)) == ours


@pytest.mark.parametrize("kind", ["position", "masked"])
def test_the_backward_pass_is_twice_the_forward_pass(tiny, kind):
    """But for the constants, and for what needs no gradient: fixed places and the first of all inputs."""
    network, task = tiny(kind, vocab=96, width=64, length=32), problems(20, 12)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        network(task).sum().backward()
    whole = (1 + flops.BACKWARD) * (flops.training(network.config, task) + constants(network))
    assert counter.get_total_flops() == pytest.approx(whole, rel=0.01)


def test_with_a_cache_only_the_encoding_is_cheaper(tiny):
    full, ordered = tiny("position").config, tiny("ordered").config
    steps, D = planned(), full.width
    every, new = flops.every_token(steps), flops.new_tokens(steps)
    spared = int((every.fresh - new.fresh).sum()) * 2 * (full.encoder * 12 + 2 * (1 + full.decoder)) * D * D
    spared += int((every.pairs - new.pairs).sum()) * 4 * full.encoder * D
    assert flops.sampling(full, steps) - flops.sampling(ordered, steps) == spared


def test_refreshing_at_every_step_is_the_full_context_and_never_is_the_cheapest(tiny):
    config, steps = tiny("position").config, planned(length=32, steps=16)
    counts = [flops.partition(config, flops.refreshed(steps, every)) for every in (1, 2, 4, 16)]
    assert counts[0] == flops.sampling(config, steps)
    assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize("kind", ["position", "ordered", "masked"])
def test_a_row_that_decides_nothing_costs_nothing(tiny, kind):
    config = tiny(kind).config
    one = Plan(torch.arange(L)[None], torch.tensor([[0, 3, 8]]))
    idle = Plan(torch.arange(L)[None], torch.tensor([[0, 0, 3, 3, 8, 8]]))
    assert flops.sampling(config, one) == flops.sampling(config, idle)
    assert flops.traffic(config, one, size=2) == flops.traffic(config, idle, size=2)


def tokens_per_second(case: SampleCase, operations: float) -> float:
    return case.batch * case.length / (operations / CEILING)


@pytest.mark.parametrize(("steps", "limit"), [(32, 312_000), (128, 80_600)])
def test_the_limit_of_pgm_8_8(steps, limit):
    case = replace(PGM_8_8, steps=steps)
    whole = planned(case.batch, case.length, steps)
    assert tokens_per_second(case, flops.sampling(case.config, whole)) == pytest.approx(limit, rel=0.003)


def test_the_limits_of_mdlm():
    """29,600 tokens/s with the head at the decided positions, 21,700 with the head everywhere."""
    case, whole = SampleCase(model="mdlm", layers=12), planned(32, 1024, 128)
    chosen, everywhere = flops.sampling(case.config, whole), flops.sampling_everywhere(case.config, whole)
    assert tokens_per_second(case, chosen) == pytest.approx(29_641, rel=1e-3)
    assert tokens_per_second(case, everywhere) == pytest.approx(21_670, rel=1e-3)


def test_the_cache_is_bound_by_bytes():
    """Whatever K, the arithmetic of PGM 8/8 is about one forward pass, 10 TFLOP; the bytes of K=128 take 34 ms."""
    case, whole = replace(PGM_8_8, context="ordered"), planned(32, 1024, 128)
    assert flops.sampling(case.config, whole) == pytest.approx(10.9e12, rel=0.01)
    assert flops.traffic(case.config, whole, size=2) / BANDWIDTH == pytest.approx(34.4e-3, rel=0.01)


@pytest.mark.parametrize(
    ("case", "operations", "images"),
    [(PGM_12_12, 9.40e12, 84), (replace(PGM_12_12, context="ordered"), 1.29e12, 614), (MASKGIT, 46.4e12, 17)],
)
def test_the_limits_of_pictures(case, operations, images):
    """Operations of a picture in 32 steps with guidance, and pictures a second at the ceiling."""
    steps = drawn(case, 1)
    counted = flops.sampling(case.config, steps, weights=Guidance(weight=2.0, dropped=1000).weights(steps))
    assert counted == pytest.approx(operations, rel=0.005)
    assert CEILING / counted == pytest.approx(images, rel=0.005)


def test_traffic_is_weights_in_each_step_and_the_cache(tiny):
    network, steps, size = tiny("ordered"), planned(), 2
    c, D = network.config, network.config.width
    matrices = {
        name: p.numel() for name, p in network.named_parameters() if p.dim() == 2 and ".modulation." not in name
    }
    context = sum(n for name, n in matrices.items() if ("encoder." in name or ".kv." in name or "swap.kv" in name))
    rest = sum(
        n for name, n in matrices.items() if name.startswith(("decoder.", "head.", "swap.out")) and ".kv." not in name
    )
    known = B * sum(range(0, L, L // K))
    cache = known * (c.encoder + 1 + c.decoder) * 2 * D
    assert flops.traffic(c, steps, size=size) == size * ((K - 1) * context + K * rest + cache)


def test_traffic_of_a_causal_network(tiny):
    c = tiny("causal").config
    known = torch.zeros(B, L, dtype=torch.bool)
    weights = c.layers * 12 * c.width**2 + c.width * c.vocab
    cache = B * (L * (L + 1) // 2) * c.layers * 2 * c.width
    assert flops.traffic(c, plan_causal(known, ~known), size=4) == 4 * (L * weights + cache)


def test_counts_do_not_overflow():
    case = SampleCase(width=8192, layers=200, length=4096, steps=4096, batch=512)
    whole = planned(case.batch, case.length, case.steps)
    assert flops.sampling(case.config, whole) > 2**63
