"""Going through a plan: what is done is not done again, what fails is noted, and what it costs is measured first.

A job that has ended leaves a file in OUT/steps with its words and what it found. One that can resume after a kill
leaves its words before it starts, so that it cannot resume with others.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from maskless import paper
from maskless.bench.machine import processor
from maskless.files import write_json
from maskless.reproduce.jobs import MissingError, TableEntry, TableJob, TablePlan
from maskless.reproduce.plan import bench_words
from maskless.train.report import read_metrics

Do = Callable[[Sequence[str]], str]  # runs a command and returns its stdout; a ValueError says what went wrong
PROGRAMS = {"maskless": ("-m", "maskless"), "torchrun": ("-m", "torch.distributed.run"), "python": ()}
WARM_UP = 0.25  # the share of a run before spikes count


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    found: Any = None
    why_not: str = ""
    machine: str = ""


def standing(plan: TablePlan, job: TableJob) -> str:
    """done, begun, or nothing; a ValueError where it was begun with other settings."""
    record = _record(plan, job)
    if record is not None and record["words"] != list(job.words):
        changed = "; ".join(_changed(record["words"], list(job.words)))
        raise ValueError(f"{_path(plan, job)} was made otherwise: {changed}; name another --out")
    if (record is not None and record["done"]) or (job.makes is not None and job.makes.exists()):
        return "done"
    return "begun" if record is not None or (job.resumes is not None and job.resumes.exists()) else ""


def run(plan: TablePlan, do: Do, on_step: Callable[[TableJob, str], None]) -> dict[str, Outcome]:
    """Do what is not done; `on_step` hears of each job before it starts."""
    stands = {name: standing(plan, job) for name, job in plan.jobs.items()}
    outcomes: dict[str, Outcome] = {}
    for name, job in plan.jobs.items():
        blocked = next((need for need in job.needs if outcomes[need].why_not), None)
        if blocked is not None:
            outcomes[name] = outcomes[blocked]
            continue
        on_step(job, stands[name])
        outcomes[name] = _once(plan, job, do, stands[name] == "done")
    return outcomes


def estimate(plan: TablePlan, do: Do, on_step: Callable[[TableJob, str], None]) -> dict[str, float]:
    """GPU hours of each training and distillation that is not done, from a short measurement of its network.

    A step of distillation is one of training and the teacher's forward passes; both have the same network.
    """
    hours: dict[str, float] = {}
    for name, cost in plan.costs.items():
        if standing(plan, plan.jobs[name]) == "done":
            continue
        job = TableJob(f"cost-of-train-{name.partition('-')[2]}", bench_words(cost.case, repeat=3))
        on_step(job, standing(plan, job))
        outcome = _once(plan, job, do, standing(plan, job) == "done")
        if outcome.why_not:
            raise ValueError(f"the cost of {name} could not be measured: {outcome.why_not}")
        speeds = {r["part"]: r["sequences_per_second"] for r in outcome.found["results"]}
        hours[name] = cost.sequences * (1 / speeds[paper.STEP] + cost.passes / speeds[paper.FORWARD]) / 3600
    return hours


def numbers(plan: TablePlan, outcomes: dict[str, Outcome]) -> Iterator[TableEntry]:
    """The entries with our values."""
    for entry in plan.entries:
        if entry.job is None:
            yield entry
        elif (outcome := outcomes[entry.job]).why_not:
            yield replace(entry, why_not=f"not run: {outcome.why_not}")
        else:
            found = metrics(plan, entry.job) if isinstance(entry.line.work, paper.Curve) else outcome.found
            try:
                value, error = _read(entry, found)
            except MissingError as missing:
                yield replace(entry, why_not=str(missing))
                continue
            except (KeyError, TypeError, ValueError, AttributeError, IndexError):
                value, error = None, None
            yield replace(entry, value=value, error=error, why_not="not among what was found" if value is None else "")


def metrics(plan: TablePlan, job: str) -> list[dict[str, Any]]:
    """The metrics of a run, by the job that trains it."""
    return read_metrics(plan.options.out / "runs" / job.removeprefix("train-") / "metrics.jsonl")


def child(command: Sequence[str]) -> str:
    """Run a command in a process of its own, which gives a GPU back whole. Its stderr is shown as it comes."""
    program, *words = command
    look = {"FORCE_COLOR": "1", "COLUMNS": str(os.get_terminal_size(2).columns)} if sys.stderr.isatty() else {}
    said, code = b"", 130
    with tempfile.TemporaryFile() as out:  # a pipe that nobody empties would stop the child
        begin = [sys.executable, *PROGRAMS[program], *words]
        with subprocess.Popen(begin, stdout=out, stderr=subprocess.PIPE, env=os.environ | look) as process:
            assert process.stderr is not None
            try:
                while some := os.read(process.stderr.fileno(), 4096):
                    said = (said + some)[-20_000:]
                    sys.stderr.write(some.decode(errors="replace"))
                    sys.stderr.flush()
                code = process.wait()
            except KeyboardInterrupt:  # the child has heard it too, and may be saving: only a second one ends it
                process.wait()
                raise
            finally:
                process.terminate()
        out.seek(0)
        printed = out.read().decode()
    if code in (130, -2):
        raise KeyboardInterrupt
    if code:
        lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
        reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        raise ValueError((reasons or lines or [f"exit code {code}"])[-1].strip())
    return printed


def _once(plan: TablePlan, job: TableJob, do: Do, done: bool) -> Outcome:
    record = _record(plan, job)
    if done and record is None:  # made by hand
        return Outcome()
    if not done:
        for folder in ("steps", "points"):
            (plan.options.out / folder).mkdir(parents=True, exist_ok=True)
        record = {"words": list(job.words), "done": False}
        if job.resumes is not None:
            write_json(_path(plan, job), record)
        begin = time.monotonic()
        try:
            said = do(job.command)
            found = _answers(job) if "--output_path" in job.words else None
            if "--json" in job.words:
                found = json.loads(said)
        except (ValueError, OSError) as error:
            if job.resumes is not None and not job.resumes.exists():
                _path(plan, job).unlink()
            return Outcome(why_not=" ".join(str(error).split()) or repr(error))
        seconds = round(time.monotonic() - begin, 1)
        machine = torch.cuda.get_device_name() if torch.cuda.is_available() else processor()
        record |= {"done": True, "seconds": seconds, "machine": machine, "found": found}
        write_json(_path(plan, job), record)
    assert record is not None
    return Outcome(record.get("found"), "", record.get("machine", ""))


def _answers(job: TableJob) -> Any:
    """The newest results that lm-eval left in its folder."""
    folder = Path(job.words[job.words.index("--output_path") + 1])
    files = sorted(folder.rglob("results_*.json"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise ValueError(f"lm-eval left no results in {folder}")
    return json.loads(files[-1].read_text())["results"]


def _read(entry: TableEntry, found: Any) -> tuple[float | None, float | None]:
    """A value and its standard error, out of what a command printed."""
    line, measure = entry.line, entry.line.measure
    match line.work:
        case paper.Bound():
            (text,) = found["bound"].values()
            best = text["both groups, stratified"]
            return best["perplexity"], best["perplexity_error"]
        case paper.Texts():
            (point,) = (point for point in found["genppl"]["points"] if point["steps"] == entry.at)
            quality = point["quality"]
            if measure == paper.GEN_PPL:
                return quality["retokenised"]["perplexity"], quality["retokenised"]["perplexity_error"]
            if measure == paper.ENTROPY:
                return quality["entropy"]["value"], quality["entropy"]["error"]
            return point["tokens_per_second"], None
        case paper.Pictures():
            (point,) = (point for point in found["points"] if point["guidance"] == entry.at)
            name = {paper.FID: "fid", paper.SCORE: "inception_score"}.get(measure)
            if name is None:
                return point["images_per_second"], None
            if measure == paper.SCORE and point["quality"][name] is None:
                raise MissingError(f"the feature network {point['quality']['network']} has no logits")
            return point["quality"][name], point["quality"].get(f"{name}_error")
        case paper.NetworkSpeed():
            (result,) = (r for r in found["results"] if entry.at in (r["case"].get("steps"), r["part"]))
            return result["tokens_per_second" if measure == paper.TOKENS else "sequences_per_second"], None
        case paper.Downstream():
            task = found.get(entry.at, {})
            value, error = task.get("acc,none"), task.get("acc_stderr,none")
            return value and 100 * value, 100 * error if isinstance(error, float) else None
        case paper.Curve():
            losses = [one for one in found if "loss" in one]
            late = [one for one in losses if one["step"] > WARM_UP * losses[-1]["step"]]
            if measure == paper.GRADIENT:
                return max(one["gradient"] for one in late), None
            return max(one["loss"] for one in late) / statistics.median(one["loss"] for one in late), None


def _path(plan: TablePlan, job: TableJob) -> Path:
    return plan.options.out / "steps" / f"{job.name}.json"


def _record(plan: TablePlan, job: TableJob) -> dict[str, Any] | None:
    path = _path(plan, job)
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text())
        return {"words": list(record["words"]), "done": bool(record["done"]), **record}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not the record of a step: {error!r}") from None


def _changed(before: list[str], now: list[str]) -> Iterator[str]:
    """--steps 100, now 200"""
    one, two = _options(before), _options(now)
    for name in one | two:
        if one.get(name) != two.get(name):
            yield f"{name} {one.get(name, 'not given')}, now {two.get(name, 'not given')}"


def _options(words: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    name = "command"
    for word in words:
        name = word if word.startswith("--") else name
        found[name] = f"{found.get(name, '')} {'' if word == name else word}".strip()
    return found
