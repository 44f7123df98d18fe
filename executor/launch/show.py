"""A plan as text: what `--dry-run` shows. Pure; the same plan is the same text."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

from executor.launch.memory import estimates
from executor.sizes import size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from executor.doctor import Finding
    from executor.launch.plan import LaunchPlan, PlannedLane, PlannedProcess

_MARKS = {"ok": "ok     ", "warning": "warning", "error": "error  "}


def show(plan: LaunchPlan) -> str:
    return "\n".join(_lines(plan)) + "\n"


def show_findings(findings: Sequence[Finding]) -> str:
    lines = ["checks"]
    for finding in findings:
        lines.append(f"  {_MARKS[finding.level]} {finding.subject}: {finding.found}")
        if finding.advice:
            lines.append(f"          → {finding.advice}")
    return "\n".join(lines) + "\n"


def _lines(plan: LaunchPlan) -> Iterator[str]:
    topology = plan.topology
    yield f"topology {topology.name}" + (f": {topology.description}" if topology.description else "")
    yield f"directory {plan.directory}"
    yield "devices"
    for gpu in plan.gpus:
        what = f"{gpu.uuid} ({gpu.model or 'unknown'})" if gpu.uuid else "not on this machine"
        yield f"  {gpu.name}: {what}" + (", MPS" if gpu.directory else "")
    if not plan.gpus:
        yield "  cpu"
    for process in plan.processes:
        yield from _process(process)
    yield "memory (from the files' headers; `speclane plan` loads and measures)"
    for lane in estimates(plan):
        where = f"at {lane.at}" if lane.at else f"on {'+'.join(lane.gpus) or 'cpu'}"
        what = lane.unknown or f"weights {size(lane.weights)}"
        if lane.kv_tokens:
            what += f", KV up to {lane.kv_tokens} tokens of {size(lane.kv_bytes_per_token)}"
        yield f"  {lane.process}/{lane.lane} {where}: {what}"


def _process(process: PlannedProcess) -> Iterator[str]:
    yield f"process {process.name} ({process.kind})"
    argv = ["python" if word == sys.executable else word for word in process.argv]
    yield f"  run      {shlex.join(argv)}"
    for name, value in process.environment.items():
        yield f"  env      {name}={value}"
    for address in process.listens:
        yield f"  listens  {address}"
    if process.needs:
        yield f"  after    {', '.join(process.needs)}"
    for lane in process.lanes:
        yield from _lane(lane)


def _lane(lane: PlannedLane) -> Iterator[str]:
    cores = f", cores {lane.cores}" if lane.cores is not None else ""
    yield f"  lane     {lane.name} on {'+'.join(lane.gpus) or 'cpu'}{cores}"
    for name, value in lane.environment.items():
        yield f"    env    {name}={value}"
