"""One launch from file to exit status."""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from executor import doctor, rundir
from executor.errors import InvalidConfig, SpeclaneError
from executor.launch import mps_watch, preflight, topology
from executor.launch.launcher import BAD_INPUT, CUT_OFF, Launcher
from executor.launch.places import PrivateDirectory, StateDirectory, directory_of, state_directory
from executor.launch.plan import make_plan
from executor.models import cache_directory
from executor.notify import Notifier

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from executor.doctor import Finding, Gpu, Machine
    from executor.launch.plan import LaunchPlan


class Prepared(NamedTuple):
    plan: LaunchPlan
    machine: Machine


def prepare(file: Path, host: str | None = None) -> Prepared:
    """Reads the topology and looks at the machine. `host`: for all targets, instead of the file's.

    Raises InvalidConfig.
    """
    read = topology.read(file)
    if host is not None:
        targets = [msgspec.structs.replace(target, host=host) for target in read.targets]
        read = msgspec.structs.replace(read, targets=targets)
    options = [each.options for each in read.targets] + [each.options for each in read.speculators]
    real = any(each.get("engine") != "toy" for each in options)
    machine = doctor.gather(cache_directory(), ask_torch=bool(read.gpus) and real)
    return Prepared(make_plan(read, machine.gpus or (), directory_of(read.name)), machine)


def check(prepared: Prepared) -> list[Finding]:
    return preflight.judge(prepared.plan, prepared.machine, preflight.look(prepared.plan))


def refuse(findings: Sequence[Finding]) -> None:
    """Raises InvalidConfig for the first error among them."""
    errors = [finding for finding in findings if finding.level == "error"]
    if errors:
        first, more = errors[0], f" (and {len(errors) - 1} more, see --dry-run)" if len(errors) > 1 else ""
        raise InvalidConfig("topology", f"{first.subject}: {first.found}; {first.advice}{more}")


def run(prepared: Prepared, state: str | None) -> int:
    """Runs it to its end. An exit status of executor.launch.launcher. Raises SpeclaneError."""
    plan = prepared.plan
    with ExitStack() as undo:
        private = PrivateDirectory(plan.directory)
        undo.callback(private.remove)
        undo.callback(rundir.sweep, rundir.bases()[0])  # of executors that were killed
        for left in private.leftovers():
            mps_watch.sweep(left)
        private.clear()
        kept = StateDirectory(state_directory(state, plan.topology.name))
        undo.callback(kept.close)
        for gpu in plan.gpus:
            if gpu.exclusive:
                before = _compute_mode(gpu.uuid, prepared.machine.gpus or ())
                mps_watch.set_compute_mode(gpu.uuid, "EXCLUSIVE_PROCESS")
                undo.callback(partial(mps_watch.set_compute_mode, gpu.uuid, before))
        launcher = Launcher(plan, private, kept, Notifier(os.environ))
        status = asyncio.run(launcher.run())
    if launcher.failure:
        if status == BAD_INPUT:
            raise InvalidConfig("topology", launcher.failure)
        raise SpeclaneError(launcher.failure)
    assert status in (0, CUT_OFF), "there is no other end without a failure"
    return status


def _compute_mode(uuid: str, gpus: Sequence[Gpu]) -> str:
    mode = next((gpu.compute_mode for gpu in gpus if gpu.uuid == uuid), "Default")
    return mode.upper()
