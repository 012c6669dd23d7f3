"""What came out of a measurement, and everything that follows from it."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass
from typing import Any

from maskless.bench.case import Case
from maskless.bench.machine import Machine
from maskless.paper.line import IMAGES, MEMORY, SECONDS, SEQUENCES, START_UP, TOKENS


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The timed runs of one case, with the arithmetic and the traffic that were counted for one run."""

    case: Case
    part: str  # sample; or forward, forward + backward, optimiser step
    times: tuple[float, ...]  # seconds
    start_up: float | None  # seconds from a network to the end of its first run: folding, compiling, capturing
    memory: int  # peak, bytes
    flops: float
    traffic: float  # bytes; 0: not counted
    machine: Machine
    flops_everywhere: float | None = None  # MDLM: with the head at every position, as the released code has it

    @property
    def seconds(self) -> float:
        return statistics.median(self.times)

    @property
    def tokens_per_second(self) -> float:
        return self.case.batch * self.case.length / self.seconds

    @property
    def sequences_per_second(self) -> float:
        return self.case.batch / self.seconds

    def read(self, measure: str) -> float:
        """One of the measures that the paper and we give figures in."""
        value = {
            TOKENS: self.tokens_per_second,
            SEQUENCES: self.sequences_per_second,
            IMAGES: self.sequences_per_second,
            SECONDS: self.seconds,
            START_UP: self.start_up,
            MEMORY: self.memory / 2**30,
        }[measure]
        assert value is not None, f"{self.part} has no {measure}"
        return value

    @property
    def limit(self) -> float:
        """The fewest seconds: no less than the arithmetic takes at the ceiling, nor than the traffic."""
        return max(self.flops / self.machine.product, self.traffic / self.machine.copy)

    @property
    def bound(self) -> str:
        """What the limit comes from."""
        return "arithmetic" if self.flops / self.machine.product >= self.traffic / self.machine.copy else "memory"

    @property
    def of_limit(self) -> float:
        """The share of the limit that was reached, 0 to 1."""
        return self.limit / self.seconds

    @property
    def achieved(self) -> float:
        """Counted FLOP/s."""
        return self.flops / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """For JSON, in seconds, bytes and FLOP."""
        return {
            "model": self.case.name,
            "part": self.part,
            "case": dataclasses.asdict(self.case),
            "seconds": {"median": self.seconds, "min": min(self.times), "max": max(self.times), "all": self.times},
            "tokens_per_second": self.tokens_per_second,
            "sequences_per_second": self.sequences_per_second,
            "start_up_seconds": self.start_up,
            "peak_memory_bytes": self.memory,
            "flops": self.flops,
            "flops_per_second": self.achieved,
            "share_of_ceiling": self.achieved / self.machine.product,
            "traffic_bytes": self.traffic,
            "limit_seconds": self.limit,
            "limit_tokens_per_second": self.tokens_per_second * self.seconds / self.limit,
            "limit_bound_by": self.bound,
            "share_of_limit": self.of_limit,
            "flops_head_everywhere": self.flops_everywhere,
        }
