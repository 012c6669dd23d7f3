"""KV slots: logits of sequences that come and go are those of the network, and a step encodes only what is new."""

import random

import pytest
import torch

from maskless.engine import Engine, backbones
from maskless.engine.kv_slots import FEWEST, KVSlots, SlotQuery, keeps
from maskless.nn.partition import PartitionConfig, PartitionTransformer
from maskless.problems import dense
from tiny_networks import shaken

LENGTH = 10


def painter():
    torch.manual_seed(0)
    config = {"vocab": 11, "length": LENGTH, "width": 16, "heads": 2, "condition": 8, "encoder": 2, "decoder": 2}
    network = PartitionTransformer(PartitionConfig(**config, classes=3, grid=(3, 3), registers=True, context="ordered"))
    return shaken(network, 0.1)


@pytest.fixture(params=["ordered", "causal", "painter"])
def network(request, tiny):
    return painter() if request.param == "painter" else tiny(request.param, scale=0.1, length=LENGTH)


class Grower:
    """A sequence whose tokens become known a few at a time."""

    def __init__(self, rng, causal, labelled):
        order = list(range(LENGTH))
        if not causal:
            rng.shuffle(order)
        if labelled:  # its BOS is always known
            order = [0, *(i for i in order if i)]
        self.order, self.tokens = torch.tensor(order), torch.tensor([rng.randrange(11) for _ in order])
        self.start, self.most = rng.randrange(1 if labelled else 0, 5), 1 if causal else 3
        self.label = rng.randrange(4) if labelled else None
        self.end = 0
        self.rng = rng

    def ask(self):
        self.end = min(LENGTH, self.start + self.rng.randint(1, self.most))
        return SlotQuery(self, self.tokens, self.order, self.start, self.end, self.label)

    def grow(self):
        self.start = self.end
        return self.start < LENGTH

    def alone(self, network):
        """The network's own answer, to this sequence alone."""
        known, asked = self.order[None, : self.start], self.order[None, self.start : self.end]
        labels = None if self.label is None else torch.tensor([self.label])
        with torch.no_grad():
            return network(dense(self.tokens[known[0]][None], known, asked, labels=labels))


def test_logits_are_the_networks_own_whoever_comes_and_goes(network):
    causal, labelled = not isinstance(network, PartitionTransformer), getattr(network.config, "classes", None)
    rng, slots, there = random.Random(0), KVSlots(Engine(network), LENGTH), []
    for step in range(60):
        if step < 40:
            there += [Grower(rng, causal, labelled) for _ in range(rng.randint(0, 3))]
        there = [one for one in there if rng.random() > 0.1]  # some leave before they are done
        slots.keep(set(there))
        assert set(slots.owners) <= set(there)
        rng.shuffle(there)
        some = there[: rng.randint(1, len(there))] if there else []  # the others wait for another call
        if not some:
            continue
        logits = slots.logits([one.ask() for one in some])
        expected = torch.cat([one.alone(network) for one in some])
        finite = expected.isfinite()
        assert torch.equal(finite, logits.isfinite())
        torch.testing.assert_close(logits[finite], expected[finite], rtol=1e-4, atol=1e-4)
        there = [one for one in there if one not in some or one.grow()]
    assert there == []


def test_a_step_encodes_only_what_is_new(tiny, monkeypatch):
    counted, plain = [], backbones.Encoder.__call__

    def counting(self, state, norms, context, *rest):
        counted.append(context.total)
        return plain(self, state, norms, context, *rest)

    monkeypatch.setattr(backbones.Encoder, "__call__", counting)
    slots = KVSlots(Engine(tiny("ordered", length=LENGTH)), LENGTH)
    order = torch.arange(LENGTH)
    for step in range(4):
        slots.logits([SlotQuery(n, order, order, 1 + 2 * step + n, 3 + 2 * step + n) for n in (0, 1)])
    assert counted == [1 + 2, 2 + 2, 2 + 2, 2 + 2]


def test_a_step_that_fails_changes_nothing(network, monkeypatch):
    causal, labelled = not isinstance(network, PartitionTransformer), getattr(network.config, "classes", None)
    rng, slots = random.Random(1), KVSlots(Engine(network), LENGTH)
    old, new = ([Grower(rng, causal, labelled) for _ in range(3)] for _ in range(2))
    slots.logits([one.ask() for one in old])
    assert all(one.grow() for one in old)
    asks = [one.ask() for one in [*new, *old]]
    with monkeypatch.context() as patch:
        patch.setattr(backbones.kernels, "logits_of", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            slots.logits(asks)
    expected = torch.cat([one.alone(network) for one in [*new, *old]])
    finite = expected.isfinite()
    torch.testing.assert_close(slots.logits(asks)[finite], expected[finite], rtol=1e-4, atol=1e-4)


def test_slots_grow_with_the_guests_and_are_given_back(tiny):
    slots = KVSlots(Engine(tiny("ordered", length=LENGTH)), LENGTH)
    order = torch.arange(LENGTH)
    slots.logits([SlotQuery(n, order, order, 1, 2) for n in range(FEWEST + 1)])
    assert slots.pool.slots == 2 * FEWEST
    assert slots.size == LENGTH * 2 * (2 + 1 + 2) * 16 * 4  # keys and values of encoder, GroupSwap and decoder
    assert sum(tensor.nbytes for tensor in slots.pool.cache.tensors) == 2 * FEWEST * slots.size
    slots.keep(())
    assert slots.pool is None


def test_no_more_slots_are_made_than_there_is_memory_for(tiny):
    engine, order = Engine(tiny("ordered", length=LENGTH)), torch.arange(LENGTH)
    size = KVSlots(engine, LENGTH).size
    slots = KVSlots(engine, LENGTH, memory=3 * size + 1)
    slots.logits([SlotQuery(n, order, order, 1, 2) for n in range(2)])
    assert slots.pool.slots == slots.most == 3


def test_what_changes_with_each_token_cannot_be_kept(tiny):
    for kind in ("position", "masked"):
        engine = Engine(tiny(kind))
        assert not keeps(engine)
        with pytest.raises(ValueError, match="expected ordered context, or causal"):
            KVSlots(engine, 8)
