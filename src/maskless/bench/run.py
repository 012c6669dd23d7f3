"""The measurements: a first run that counts as start-up, a second's worth that warms up, then those that count."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from maskless import flops
from maskless.bench.case import PRECISIONS, Case, DrawCase, SampleCase, TrainCase
from maskless.bench.machine import Machine, Timing, forget_peak, now, peak_memory
from maskless.draw import Guidance
from maskless.ema import EMA
from maskless.engine import Engine
from maskless.how import check_positive
from maskless.logits import row_keys
from maskless.nn import autocast
from maskless.nn.loss import cost
from maskless.nn.masked import MaskedConfig
from maskless.objective import Task, noise
from maskless.order import COUNTS, Order, after_lead, halton, random
from maskless.paper import BACKWARD, FORWARD, SAMPLE, STEP
from maskless.plans import Plan, plan, plan_causal
from maskless.train.captured import Captured
from maskless.train.config import RAGGED
from maskless.train.loop import compile_layers
from maskless.train.tasks import objective_of

WARM_UP = 2  # runs at most, besides the first
LONG = 1.0  # seconds of warm-up that are enough
QUEUED = 4  # passes of training that a GPU is given before the clock is read: training itself never waits for one
OnRun = Callable[[Case], None]


def runs_of(case: Case, repeat: int) -> int:
    """How many runs it takes to measure a case, at most."""
    parts = 1 if isinstance(case, SampleCase) else 3
    return 1 + parts * (WARM_UP + repeat)


def check(cases: Iterable[Case], device: torch.device, repeat: int) -> None:
    """Raise a ValueError for what cannot be measured, before anything is."""
    check_positive(repeat=repeat)
    if device.type == "cpu" and any(isinstance(case, TrainCase) and case.precision == "bf16" for case in cases):
        raise ValueError("precision 'bf16' on a CPU: expected fp32, which is what training computes in there")


def measure(cases: Iterable[Case], machine: Machine, *, repeat: int, on_run: OnRun) -> Iterator[Timing]:
    """Measure case after case, calling `on_run` after each run."""
    bench = Bench(machine, repeat, on_run)
    for case in cases:
        try:
            if isinstance(case, SampleCase):
                yield bench.sampling(case)
            elif isinstance(case, TrainCase):
                yield from bench.training(case)
        except torch.OutOfMemoryError:
            given = f"length {case.length} and batch {case.batch}"
            raise ValueError(f"{case.name} with {given} does not fit into the memory of {machine.name}") from None


@dataclass(frozen=True)
class Bench:
    """Where to measure, and how often."""

    machine: Machine
    repeat: int
    on_run: OnRun

    @property
    def device(self) -> torch.device:
        return torch.device(self.machine.device)

    def sampling(self, case: SampleCase) -> Timing:
        """Whole runs of sampling, each with an order and draws of its own, planned before the clock starts."""
        forget_peak(self.device)
        network = case.network(self.device).eval()
        plans = [_plan(case, seed) for seed in range(1 + WARM_UP + self.repeat)]
        begin = now(self.device)
        engine = Engine(network, precision=PRECISIONS[case.precision])

        def work(number: int) -> Callable[[], None]:
            tokens, how = torch.zeros_like(plans[number].order), _how(case, number)
            if isinstance(case, DrawCase):
                tokens[:, 0] = case.vocab + 1  # BOS
            return lambda: engine.sample(tokens, plans[number], _keys(case, number), **how)

        try:
            self._run(case, work(0))
            start_up = now(self.device) - begin
            times = self._repeat(case, lambda number: work(1 + number))
        finally:
            engine.close()
        config, counted = case.config, plans[1 + WARM_UP :]
        weights = [_guidance(case).weights(p) if isinstance(case, DrawCase) else None for p in counted]
        works = [(config, p, case.refresh, w) for p, w in zip(counted, weights, strict=True)]
        everywhere = [flops.sampling_everywhere(config, p) for p in counted if isinstance(config, MaskedConfig)]
        return Timing(
            case=case,
            part=SAMPLE,
            times=times,
            start_up=start_up,
            memory=peak_memory(self.device),
            flops=mean(flops.sampling(*work) for work in works),
            traffic=mean(flops.traffic(*work, size=PRECISIONS[case.precision].itemsize) for work in works),
            machine=self.machine,
            flops_everywhere=mean(everywhere) if everywhere else None,
        )

    def training(self, case: TrainCase) -> Iterator[Timing]:
        """The forward and backward pass, the forward pass alone, and whole optimiser steps, on fresh tasks each."""
        device, low = self.device, case.precision == "bf16"
        queued = QUEUED if device.type == "cuda" else 1
        tasks = [_task(case, number) for number in range(1 + WARM_UP + self.repeat)]
        each = mean(flops.training(case.config, task.problems) for task in tasks[1 + WARM_UP :])
        tasks = [task.map(lambda x: x.to(device)) for task in tasks]
        network = case.network(device).train()
        begin = now(device)
        settings = case.settings
        compile_layers(network, settings, device)
        adam = torch.optim.AdamW(network.parameters(), lr=settings.learning_rate, weight_decay=0.0, fused=True)
        averages: list[EMA] = []  # made in the first step, as Adam's are: the other parts do not hold them

        def forward(task: Task, once: Captured) -> None:
            with torch.no_grad():
                loss(network, task, low=low)

        def backward(task: Task, once: Captured) -> None:
            once(task, 1.0)

        def step(task: Task, once: Captured) -> None:
            once(task, 1.0)
            nn.utils.clip_grad_norm_(network.parameters(), settings.clip)
            adam.step()
            if not averages:
                averages.append(EMA(network.parameters(), settings.ema))
            averages[0].update(network.parameters())

        def passed(task: Task, scale: Tensor) -> Tensor:
            found = loss(network, task, low=low) * scale
            found.backward()
            return found

        def timed(work: Callable[[Task, Captured], None]) -> tuple[float, ...]:
            once = Captured(passed, network.parameters(), device, enabled=settings.task not in RAGGED)

            def passes(number: int) -> None:
                for _ in range(queued):
                    adam.zero_grad(set_to_none=True)
                    work(tasks[1 + number], once)

            return tuple(seconds / queued for seconds in self._repeat(case, lambda number: partial(passes, number)))

        self._run(case, lambda: backward(tasks[0], Captured(passed, network.parameters(), device, enabled=False)))
        start_up = now(device) - begin
        whole = 1 + flops.BACKWARD
        for part, work, share in ((BACKWARD, backward, whole), (FORWARD, forward, 1), (STEP, step, whole)):
            adam.zero_grad(set_to_none=True)
            forget_peak(device)
            yield Timing(
                case=case,
                part=part,
                times=timed(work),
                start_up=start_up if part == BACKWARD else None,
                memory=peak_memory(device),
                flops=share * each,
                traffic=0,
                machine=self.machine,
            )

    def _repeat(self, case: Case, work: Callable[[int], Callable[[], None]]) -> tuple[float, ...]:
        """Seconds of the runs after the warm-up; work(number) makes a run ready, before the clock starts."""
        warm = 0.0
        for number in range(WARM_UP):
            if warm < LONG:
                warm += self._run(case, work(number))
            else:
                self.on_run(case)
        return tuple(self._run(case, work(WARM_UP + number)) for number in range(self.repeat))

    def _run(self, case: Case, work: Callable[[], None]) -> float:
        begin = now(self.device)
        work()
        seconds = now(self.device) - begin
        self.on_run(case)
        return seconds


def loss(network: nn.Module, task: Task, *, low: bool) -> Tensor:
    """The loss of a task as the training loop computes it, per token; low: products in bfloat16."""
    with autocast(task.weights.device, enabled=low):
        total = network(task.problems, partial(cost, answers=task.answers, weights=task.weights))
    return total / len(task.weights)


def _keys(case: Case, seed: int) -> Tensor:
    return row_keys(seed, torch.arange(case.batch))


def _plan(case: SampleCase, seed: int) -> Plan:
    """Everything unknown, everything wanted; of a picture all but the BOS."""
    known = torch.zeros(case.batch, case.config.length, dtype=torch.bool)
    if case.model == "ar":
        return plan_causal(known, ~known)
    order: Order = random
    if isinstance(case, DrawCase):
        known[:, 0], order = True, after_lead(halton(case.grid), 1)
    return plan(known, ~known, _keys(case, seed), steps=case.steps, order=order, counts=COUNTS[case.counts])


def _how(case: SampleCase, seed: int) -> dict[str, Any]:
    """What else the engine is told."""
    if not isinstance(case, DrawCase):
        return {"refresh": case.refresh}
    labels = (seed + torch.arange(case.batch)) % case.classes
    never = tuple(i for i in (case.vocab, case.vocab + 1) if i < case.config.vocab)  # mask and BOS
    return {"labels": labels, "guidance": _guidance(case), "never": never, "warmup": 1}


def _guidance(case: DrawCase) -> Guidance:
    return Guidance(weight=case.guidance, dropped=case.classes)


def _task(case: TrainCase, step: int) -> Task:
    """Random tokens with fresh noise, so that the groups differ from step to step."""
    tokens = torch.randint(case.vocab, (case.batch, case.length), generator=torch.Generator().manual_seed(step))
    build = objective_of(case.settings)
    return build(tokens, *noise(case.batch, case.length, seed=0, step=step), torch.ones_like(tokens, dtype=torch.bool))
