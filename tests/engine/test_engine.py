"""The engine decides the same tokens as the plain loop, from logits that are equal to rounding."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from engine_runs import capturing, pairs
from torch import Tensor

from maskless.draw import Truncation
from maskless.engine import Engine, serves
from maskless.engine import graphs as graphs_module
from maskless.engine import run as run_module
from maskless.engine.engine import SHAPES
from maskless.engine.graphs import Equal, Graphs, Rounded
from maskless.engine.run import Kind, RowsToDecide
from maskless.logits import row_keys
from maskless.order import COUNTS, ORDERS
from maskless.plans import Plan, plan, plan_causal
from maskless.problems import split
from maskless.sampling import sample

KINDS = ["position", "ordered", "masked", "causal"]
B, L, V = 4, 8, 10


def state(kind: str, given: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and a mask of known ones: none, as many in each row, or some."""
    generator = torch.Generator().manual_seed(seed)
    tokens, known = torch.randint(V, (B, L), generator=generator), torch.zeros(B, L, dtype=torch.bool)
    if kind == "causal":
        lengths = {"nothing": [0] * B, "equal": [3] * B, "ragged": [0, 2, 3, 7]}[given]
        known = torch.arange(L) < torch.tensor(lengths)[:, None]
    elif given == "equal":
        known[:, [1, 4, 6]] = True
    elif given == "ragged":
        known = torch.rand(B, L, generator=generator) < 0.4
    return torch.where(known, tokens, 0), known


def planned(kind: str, known: Tensor, keys: Tensor, steps: int, order: str = "random", counts: str = "uniform") -> Plan:
    if kind == "causal":
        return plan_causal(known, ~known)
    steps = min(steps, int((~known).sum(1).max()))
    return plan(known, ~known, keys, steps=steps, order=ORDERS[order], counts=COUNTS[counts])


WAYS = [("causal", "uniform"), *((kind, counts) for kind in KINDS if kind != "causal" for counts in COUNTS)]


@pytest.mark.parametrize("given", ["nothing", "equal", "ragged"])
@pytest.mark.parametrize(("kind", "counts"), WAYS)
@pytest.mark.parametrize("steps", [1, 3, 8])
def test_the_engine_decides_what_the_plain_loop_decides(tiny, kind, steps, counts, given):
    network, keys = tiny(kind, scale=0.3), row_keys(steps, torch.arange(B))
    tokens, known = state(kind, given, steps)
    way, mine = planned(kind, known, keys, steps, counts=counts), tokens.clone()
    expected, seen = list(sample(network, tokens, way, keys, filter=Truncation())), []
    Engine(network).sample(mine, way, keys, on_step=seen.append)
    assert torch.equal(mine, tokens)
    assert pairs(seen) == pairs(expected)


@pytest.mark.parametrize("given", ["nothing", "ragged"])
@pytest.mark.parametrize(("kind", "counts"), WAYS)
def test_ragged_steps_are_rounded_for_graphs_without_changing_a_token(tiny, kind, counts, given, monkeypatch):
    monkeypatch.setattr(run_module, "GRAIN", 3)
    network = tiny(kind, scale=0.3)
    engine = capturing(network, monkeypatch)
    for seed in range(4):  # other counts each time, on the same buffers
        keys = row_keys(seed, torch.arange(B))
        tokens, known = state(kind, given)
        way, mine = planned(kind, known, keys, 8, counts=counts), tokens.clone()
        list(sample(network, tokens, way, keys, filter=Truncation()))
        engine.sample(mine, way, keys)
        assert torch.equal(mine, tokens), seed
    ((_, run),) = engine.runs
    shapes = run.graphs.shapes
    ragged = counts == "mdlm" or given == "ragged"
    assert any(isinstance(shape, Rounded) for shape in shapes) == (ragged and kind in ("ordered", "masked"))


@pytest.mark.parametrize("swap", ["residual", "gated", "released"])
@pytest.mark.parametrize(
    "filter", [Truncation(temperature=0.5), Truncation(temperature=0), Truncation(top_k=2, top_p=0.9)]
)
def test_filters_are_those_of_the_plain_loop(tiny, filter, swap):
    network, keys = tiny("ordered", scale=0.3, swap=swap), row_keys(0, torch.arange(B))
    tokens, known = state("ordered", "equal")
    way, mine = planned("ordered", known, keys, 3), tokens.clone()
    list(sample(network, tokens, way, keys, filter=filter))
    Engine(network).sample(mine, way, keys, filter=filter)
    assert torch.equal(mine, tokens)


def engine_logits(engine: Engine, tokens: Tensor, way: Plan, keys: Tensor, cached: bool) -> list[Tensor]:
    """The logits of each step, either from the cache or with all that is known encoded anew."""
    rows, length = tokens.shape
    kind = Kind(rows=rows, length=length, keeps=cached or engine.backbone.keeps, filter=Truncation())
    with engine._lent(kind) as run:
        pass  # nobody else is there
    task = RowsToDecide(tokens=tokens, plan=way, keys=keys, labels=torch.zeros(rows, dtype=torch.long))
    run.begin(task, way.ends[:, 0], Truncation())
    lead = engine.backbone.lead
    found, encoded = [], torch.zeros(len(tokens), dtype=torch.long)
    land = run._land
    run._land = lambda logits, at: found.append(logits + engine.backbone.head.bias) or land(logits, at)
    for number in range(way.steps):
        starts, ends = way.ends[:, number] + lead, way.ends[:, number + 1] + lead
        whole = not cached or number == 0
        with torch.no_grad():
            run.step(starts, ends, starts if whole else starts - encoded, whole)
        encoded = starts
    return [x[:, : engine.backbone.head.vocab] for x in found]


@pytest.mark.parametrize("given", ["nothing", "equal", "ragged"])
def test_cached_logits_equal_uncached_ones_and_those_of_the_network(tiny, given):
    network, keys = tiny("ordered", scale=0.3), row_keys(1, torch.arange(B))
    tokens, known = state("ordered", given)
    way, engine = planned("ordered", known, keys, 3), Engine(network)
    cached = engine_logits(engine, tokens, way, keys, cached=True)
    afresh = engine_logits(engine, tokens, way, keys, cached=False)
    engine.sample(tokens, way, keys)
    for number, (mine, uncached) in enumerate(zip(cached, afresh, strict=True)):
        problems, _ = split(tokens, way.order, way.ends[:, number], way.ends[:, number + 1])
        with torch.no_grad():
            plain = network(problems)
        torch.testing.assert_close(mine, plain, atol=1e-4, rtol=0)
        torch.testing.assert_close(uncached, plain, atol=1e-4, rtol=0)


def test_a_rare_refresh_does_not_depend_on_rows_beside(tiny):
    """Also where a row rests in the step that refreshes the others."""
    network, differ = tiny("position", scale=0.3), 0
    for seed in range(8):
        keys = row_keys(seed, torch.arange(B))
        tokens, known = state("position", "nothing")
        way = planned("position", known, keys, 6, counts="mdlm")
        alone, exact = tokens.clone(), tokens.clone()
        Engine(network).sample(tokens, way, keys, refresh=2)
        Engine(network).sample(exact, way, keys)
        for row in range(B):
            own = Plan(way.order[row : row + 1], way.ends[row : row + 1])
            Engine(network).sample(alone[row : row + 1], own, keys[row : row + 1], refresh=2)
        assert torch.equal(alone, tokens)
        differ += not torch.equal(exact, tokens)
    assert differ


def test_a_refreshed_step_is_exact_and_one_between_is_not(tiny):
    network, keys = tiny("position", scale=0.3), row_keys(1, torch.arange(B))
    tokens, known = state("position", "equal")
    way, engine = planned("position", known, keys, 3), Engine(network)
    exact = engine_logits(engine, tokens, way, keys, cached=False)
    stale = engine_logits(engine, tokens, way, keys, cached=True)  # encoded whole in the first step only
    torch.testing.assert_close(stale[0], exact[0], atol=1e-4, rtol=0)
    assert (stale[1] - exact[1]).abs().max() > 1e-3


def test_what_the_engine_does_not_serve_it_says(tiny):
    assert [serves(tiny(kind)) for kind in ("position", "ordered", "masked", "causal")] == [True] * 4
    others = tiny("mean"), tiny("logsumexp"), tiny("masked", always_full=False)
    assert not any(serves(network) for network in others)
    with pytest.raises(ValueError, match="does not serve"):
        Engine(tiny("mean"))
    keys = row_keys(0, torch.arange(B))
    tokens, known = state("ordered", "nothing")
    way = planned("ordered", known, keys, 3)
    with pytest.raises(ValueError, match="refresh 0 is out of range"):
        Engine(tiny("position")).sample(tokens, way, keys, refresh=0)
    with pytest.raises(ValueError, match="refresh 2 goes with the full context"):
        Engine(tiny("ordered")).sample(tokens, way, keys, refresh=2)


def test_an_engine_keeps_a_few_sizes_and_not_the_network(tiny):
    network, keys = tiny("ordered"), row_keys(0, torch.arange(1))
    engine = Engine(network)
    for length in range(2, SHAPES + 4):
        known = torch.zeros(1, length, dtype=torch.bool)
        engine.sample(torch.zeros(1, length, dtype=torch.long), planned("ordered", known, keys, 2), keys)
    assert len(engine.runs) == SHAPES
    watched = weakref.ref(network)
    del network
    gc.collect()
    assert watched() is None
    engine.close()
    assert not engine.runs


@pytest.mark.parametrize("kind", ["position", "ordered", "masked"])
def test_answers_are_those_of_the_network(tiny, kind):
    """Also where rows have other lengths, and one knows nothing."""
    network = tiny(kind, scale=0.3)
    tokens, known = state(kind, "ragged")
    known[0] = False
    way = planned(kind, known, row_keys(0, torch.arange(B)), 2)
    problems, _ = split(tokens, way.order, way.ends[:, 0], way.ends[:, 2])
    with torch.no_grad():
        expected = network(problems)
    torch.testing.assert_close(Engine(network).answer(problems), expected, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="a causal model goes from left to right"):
        Engine(tiny("causal")).answer(problems)


@pytest.mark.gpu
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("kind", KINDS)
def test_replayed_steps_decide_what_computed_ones_decide(tiny, kind, counts):
    """The first run is computed, the second captured, the third replayed: each time other keys, as without graphs."""
    network = tiny(kind, scale=0.3, width=64, heads=2, length=32).cuda()
    engine, plain = Engine(network), Engine(network, graphs=False)
    known = torch.zeros(3, 32, dtype=torch.bool)
    for seed in range(4):
        keys = row_keys(seed, torch.arange(3))
        way = planned(kind, known, keys, 8, counts=counts)
        mine, expected = torch.zeros(2, 3, 32, dtype=torch.long)
        engine.sample(mine, way, keys)
        plain.sample(expected, way, keys)
        assert torch.equal(mine, expected), seed


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_engine_logits_err_no_more_than_a_plain_model_in_half_precision(tiny, kind):
    sizes = {"vocab": 1000, "length": 64, "width": 256, "heads": 4}
    network, keys = tiny(kind, scale=0.02, **sizes), row_keys(1, torch.arange(B))
    known = torch.zeros(B, 64, dtype=torch.bool)
    tokens = torch.zeros(B, 64, dtype=torch.long)
    way = planned(kind, known, keys, 4)
    engine = Engine(network.cuda(), graphs=False)
    mine = engine_logits(engine, tokens, way, keys, cached=kind in ("ordered", "causal"))
    tokens.scatter_(1, way.order, engine.runs[0][1].decided())
    half = tiny(kind, scale=0.02, **sizes).cuda().bfloat16()
    half.rope = network.rope  # positions stay exact, as in the engine
    worst = 0.0
    for number in range(way.steps):
        problems, _ = split(tokens, way.order, way.ends[:, number], way.ends[:, number + 1])
        problems = problems.to("cuda")
        with torch.no_grad():
            exact, rough = network(problems).double(), half(problems).double()
        real = exact > -1e9
        worst = max(worst, ((mine[number] - exact)[real].std() / (rough - exact)[real].std()).item())
    assert worst <= 1.0


@pytest.mark.gpu
@pytest.mark.parametrize("filter", [Truncation(temperature=0.8), Truncation(temperature=0.8, top_p=0.9)])
def test_draws_on_a_gpu_follow_the_probabilities(p_value, filter):
    from maskless.engine import kernels

    generator = torch.Generator().manual_seed(0)
    logits, bias = torch.randn(1, 5000, generator=generator) * 2, torch.randn(5000, generator=generator)
    bias[7] = -torch.inf
    found = []
    for u in torch.rand(10, 20_000, generator=generator, dtype=torch.float64).cuda():
        at, largest = torch.arange(len(u), device="cuda"), torch.zeros((), dtype=torch.long, device="cuda")
        into = kernels.Landing(at=at, tokens=torch.zeros_like(at), largest=largest, vocab=5000, u=u)
        kernels.draw(logits.cuda().expand(len(u), -1).contiguous(), bias.cuda(), filter, into)
        found.append(into.tokens.cpu())
    nothing = torch.zeros(1)
    probability = filter(logits + bias, nothing, nothing).double().softmax(-1)[0]
    assert p_value(torch.cat(found).bincount(minlength=5000), probability * 200_000) > 1e-4


def test_steps_that_were_seen_are_captured_together_the_largest_first(monkeypatch):
    """Each step grows, so memory freed by a smaller one would never do for the next."""
    seen = []
    graph = SimpleNamespace(capture_begin=lambda **_: seen.append("capture"), capture_end=lambda: None)
    graph.replay = lambda: seen.append("replay")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append("free"))
    monkeypatch.setattr(graphs_module, "give_back_spare", lambda: None)
    graphs = Graphs()
    for _ in range(3):
        for n in (1, 3, 2):
            graphs.play(Equal(1, n, 1, False), lambda shape: seen.append(shape.context))
    computed, captured = [1, 3, 2], ["free", "capture", 3, "capture", 2, "capture", 1]
    assert seen == computed + captured + 6 * ["replay"]


def test_a_run_that_captures_is_gone_with_its_last_user(tiny, monkeypatch):
    """No cycle holds it: memory of a GPU must not wait for the garbage collector."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(graphs_module, "give_back_spare", lambda: None)
    engine, keys, known = Engine(tiny("position")), row_keys(0, torch.arange(B)), torch.zeros(B, L, dtype=torch.bool)
    engine.graphs = True
    engine.sample(torch.zeros(B, L, dtype=torch.long), planned("position", known, keys, 4), keys)
    (run,) = (weakref.ref(run) for _, run in engine.runs)
    assert len(run().graphs.seen) == 4
    gc.disable()
    try:
        engine.close()
        assert run() is None
    finally:
        gc.enable()


@pytest.mark.gpu
def test_captured_steps_take_little_more_memory_than_the_largest(tiny):
    """A run of growing steps; without sharing they would take half as much as all of them together."""
    network, rows, length = tiny("position", width=256, heads=4, length=256).cuda(), 64, 256
    taken = {}
    for steps in (1, 64):
        engine, known = Engine(network), torch.zeros(rows, length, dtype=torch.bool)
        known[:, : length - 64] = steps == 1  # one step with the context of the last of 64
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        for seed in range(3):
            keys = row_keys(seed, torch.arange(rows))
            way = planned("position", known, keys, steps)
            engine.sample(torch.zeros(rows, length, dtype=torch.long), way, keys)
        torch.cuda.empty_cache()
        taken[steps] = torch.cuda.memory_reserved() - before
        engine.close()
    assert taken[64] < 4 * taken[1], taken
