"""With labels, registers, guidance and MaskGIT, the engine decides the same tokens as the plain loop."""

from dataclasses import replace

import pytest
import torch
from engine_runs import capturing, pairs
from torch import Tensor, nn

from maskless.drafts import Step
from maskless.draw import SCHEDULES, Guidance, Truncation
from maskless.engine import Engine
from maskless.engine import run as run_module
from maskless.engine.graphs import Equal, Rounded
from maskless.engine.stream import Conditions
from maskless.logits import row_keys
from maskless.nn.maskgit import MaskGIT, MaskGITConfig
from maskless.nn.partition import PartitionConfig, PartitionTransformer
from maskless.order import COUNTS, after_lead, halton
from maskless.plans import Plan, plan
from maskless.sampling import sample
from tiny_networks import shaken

B, GRID, CODES, CLASSES = 4, (3, 4), 11, 5
L, MASK, BOS = 1 + GRID[0] * GRID[1], CODES, CODES + 1
LABELS = torch.tensor([3, 0, 3, CLASSES])  # one twice, one dropped
SIZES = {"vocab": CODES + 2, "length": L, "width": 32, "heads": 2, "condition": 16, "encoder": 2, "decoder": 2}
KINDS = {
    "full": {"registers": True},
    "ordered": {"registers": True, "context": "ordered"},
    "full, no register": {"rope": "2d"},
    "ordered, residual": {"context": "ordered", "swap": "residual", "never": MASK},
}


def image_network(kind: str, seed: int = 0, scale: float = 0.2, **more) -> nn.Module:
    """Tiny, with every parameter away from its start."""
    torch.manual_seed(seed)
    network: nn.Module
    if kind == "maskgit":
        sizes = {"vocab": CODES + 1, "mask": MASK, "length": L, "classes": CLASSES, "width": 32, "heads": 2}
        network = MaskGIT(MaskGITConfig(**sizes | {"layers": 2, "hidden": 24, "grid": GRID} | more))
    else:
        config = SIZES | {"classes": CLASSES, "grid": GRID} | KINDS[kind] | more
        network = PartitionTransformer(PartitionConfig(**config))
    return shaken(network, scale)


def state(given: str, rows: int = B) -> tuple[Tensor, Tensor]:
    """BOS and a grid; known: BOS alone, some cells too, or other cells in each row, in the last all but one."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(CODES, (rows, L), generator=generator)
    tokens[:, 0] = BOS
    known = torch.zeros(rows, L, dtype=torch.bool)
    if given == "equal":
        known[:, [2, 5, 11]] = True
    elif given == "ragged":
        known = torch.rand(rows, L, generator=generator) < torch.linspace(0, 0.8, rows)[:, None]
        known[-1] = torch.arange(L) != 7
    known[:, 0] = True
    return torch.where(known, tokens, 0), known


def planned(known: Tensor, keys: Tensor, steps: int, counts: str = "arccos") -> Plan:
    return plan(known, ~known, keys, steps=steps, order=after_lead(halton(GRID), 1), counts=COUNTS[counts])


def never_of(network: nn.Module) -> tuple[int, ...]:
    return tuple(i for i in (MASK, BOS) if i < network.config.vocab)


def both(
    network: nn.Module,
    engine: Engine,
    given: str = "nothing",
    *,
    seed: int = 0,
    steps: int = 5,
    counts: str = "arccos",
    weight: float = 3.0,
    schedule: str = "ramp",
    warmup: int = 1,
    truncation: Truncation | None = None,
) -> tuple[list[Step], list[Step]]:
    """The steps of the plain loop and those of the engine, after it was seen that the tokens agree."""
    truncation = truncation or Truncation()
    (tokens, known), keys = state(given), row_keys(seed, torch.arange(B))
    way = planned(known, keys, steps, counts)
    guidance = Guidance(weight=weight, dropped=CLASSES, schedule=SCHEDULES[schedule])
    mine, seen = tokens.clone(), []
    how = {"labels": LABELS, "guidance": guidance}
    how |= {"never": never_of(network), "warmup": warmup, "filter": truncation}
    plain = list(sample(network, tokens, way, keys, **how))
    engine.sample(mine, way, keys, on_step=seen.append, **how)
    assert torch.equal(mine, tokens)
    assert (mine[:, 1:] < CODES).all()
    return plain, seen


@pytest.mark.parametrize("given", ["nothing", "equal", "ragged"])
@pytest.mark.parametrize(("weight", "schedule"), [(0.0, "ramp"), (3.0, "ramp"), (1.5, "constant")])
@pytest.mark.parametrize("kind", [*KINDS, "maskgit"])
def test_the_engine_decides_what_the_plain_loop_decides(kind, weight, schedule, given):
    network = image_network(kind)
    engine = Engine(network)
    for counts, steps in (("arccos", 5), ("mdlm", 4), ("uniform", 1)):
        plain, seen = both(network, engine, given, counts=counts, steps=steps, weight=weight, schedule=schedule)
        assert pairs(seen) == pairs(plain)


@pytest.mark.parametrize("weight", [0.0, 2.0])
@pytest.mark.parametrize("kind", ["full", "ordered", "maskgit"])
def test_the_second_half_is_left_out_where_it_has_no_weight_and_nothing_is_cached(kind, weight, monkeypatch):
    network = image_network(kind)
    engine = capturing(network, monkeypatch)
    for seed in range(3):  # the same buffers again: other draws, weights and labels
        both(network, engine, seed=seed, steps=4, weight=weight)
    ((_, run),) = engine.runs
    halves = [1, 1, 1, 1] if not weight else [2, 2, 2, 2] if kind == "ordered" else [1, 2, 2, 2]
    assert [shape.rows // B for shape in run.graphs.shapes] == 3 * halves
    assert run.state.known.shape == ((2 * B if weight else B + 1),)


def test_a_rare_refresh_caches_both_halves(monkeypatch):
    """The first step is exact, and later ones encode only what is new, in rows with and without their labels."""
    network = image_network("full")
    engine = capturing(network, monkeypatch)
    (tokens, known), keys = state("nothing"), row_keys(0, torch.arange(B))
    way = planned(known, keys, 4, "uniform")
    how = {"labels": LABELS, "guidance": Guidance(weight=2.0, dropped=CLASSES)}
    exact, rare = [], []
    engine.sample(tokens.clone(), way, keys, on_step=exact.append, **how)
    engine.sample(tokens, way, keys, on_step=rare.append, refresh=4, **how)
    assert pairs(rare[:1]) == pairs(exact[:1])
    _, run = engine.runs[-1]
    assert run.graphs.shapes == [Equal(2 * B, 2, 3, True), *[Equal(2 * B, 3, 3, False)] * 3]


def test_ragged_steps_without_guidance_are_rounded(monkeypatch):
    monkeypatch.setattr(run_module, "GRAIN", 3)
    network = image_network("ordered")
    engine = capturing(network, monkeypatch)
    both(network, engine, "ragged", weight=0.0)
    ((_, run),) = engine.runs
    assert {type(shape) for shape in run.graphs.shapes} == {Rounded}


def test_modulations_are_computed_once_for_each_distinct_label(monkeypatch):
    asked: list[int] = []
    network = image_network("full")
    engine = Engine(network)
    conditions = engine.backbone.norms
    assert isinstance(conditions, Conditions)
    table = conditions.table

    class Watched:
        def __len__(self):
            return len(table)

        def index_select(self, dim, index):
            asked.append(len(index))
            return table.index_select(dim, index)

    engine.backbone.norms = replace(conditions, table=Watched())
    both(network, engine)
    assert asked == [3]  # labels 3 and 0 and the dropped one, in rows with and without their labels


def test_what_does_not_fit_is_said():
    network = image_network("full")
    engine = Engine(network)
    (tokens, known), keys = state("nothing"), row_keys(0, torch.arange(B))
    way = planned(known, keys, 2)
    for how, says in (
        ({"labels": LABELS[:2]}, r"labels \(2,\): expected one for each of 4 rows"),
        ({"labels": LABELS + 1}, "expected 0 to 5"),
        ({"guidance": Guidance(weight=2.0, dropped=CLASSES)}, "guidance 2.0 needs labels"),
        ({"labels": LABELS, "guidance": Guidance(weight=2.0, dropped=3)}, "drops labels to 3: expected 5"),
        ({"warmup": -1}, "warmup -1 is out of range"),
    ):
        with pytest.raises(ValueError, match=says):
            engine.sample(tokens, way, keys, **how)
    with pytest.raises(ValueError, match="labels were given to a network without classes"):
        Engine(image_network("full", classes=None)).sample(tokens, way, keys, labels=LABELS)
    undecided = Plan(way.order.flip(1), torch.tensor([[0, L]]).repeat(B, 1))
    with pytest.raises(ValueError, match=r"the first token \(BOS\) is to be decided"):
        engine.sample(tokens, undecided, keys)


@pytest.mark.gpu
@pytest.mark.parametrize("given", ["nothing", "equal", "ragged"])
@pytest.mark.parametrize("truncation", [Truncation(), Truncation(top_k=5, top_p=0.9)])
@pytest.mark.parametrize("kind", ["full", "ordered", "maskgit"])
def test_replayed_steps_decide_what_computed_ones_decide(kind, truncation, given):
    """The first run is computed, the second captured, the third replayed: each time other keys and labels."""
    network = image_network(kind).cuda()
    engine, plain = Engine(network), Engine(network, graphs=False)
    _, known = state(given)
    for seed in range(4):
        keys, labels = row_keys(seed, torch.arange(B)), torch.arange(B).roll(seed)
        way = planned(known, keys, 4)
        tokens, mine = state(given)[0], state(given)[0]
        how = {"labels": labels, "guidance": Guidance(weight=2.0 + seed, dropped=CLASSES), "filter": truncation}
        how |= {"never": never_of(network), "warmup": 1}
        engine.sample(mine, way, keys, **how)
        plain.sample(tokens, way, keys, **how)
        assert torch.equal(mine, tokens), seed


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["full", "ordered", "maskgit"])
def test_a_gpu_in_full_precision_decides_what_a_cpu_decides(kind):
    network = image_network(kind)
    (expected, known), keys = state("ragged"), row_keys(0, torch.arange(B))
    mine = expected.clone()
    way = planned(known, keys, 5)
    how = {"labels": LABELS, "guidance": Guidance(weight=2.0, dropped=CLASSES), "warmup": 1}
    Engine(network).sample(expected, way, keys, never=never_of(network), **how)
    Engine(network.cuda(), precision=torch.float32).sample(mine, way, keys, never=never_of(network), **how)
    assert torch.equal(mine, expected)
