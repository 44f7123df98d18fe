"""The MPS daemons of a launch: their directories, whether they answer, whether the lanes are their clients.

A program whose daemon cannot be reached runs without MPS and says nothing, so attachment is asked for.
"""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from executor.errors import SpeclaneError
from executor.launch.child import Child, State
from executor.mps import LOG, PIPE, MpsControl, MpsFailed, directories

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from executor.launch.plan import LaunchPlan

_PERIOD_SECONDS = 0.5
_HUNG_SECONDS = 15.0
_QUIT_SECONDS = 5.0
_SMI_SECONDS = 20.0


@dataclass(slots=True)
class Seen:
    """ready: the daemon answers. strays: processes with a lane that is no client of it, and why that is bad.
    broken: why it, and all on its GPU, must start again."""

    ready: bool = False
    strays: dict[str, str] = field(default_factory=dict)
    broken: str = ""


class MpsWatch:
    def __init__(self, plan: LaunchPlan) -> None:
        self.daemons: dict[str, Path] = {
            gpu.name: gpu.directory for gpu in plan.gpus if gpu.directory is not None
        }
        self.period = _PERIOD_SECONDS
        self._plan = plan
        self._controls = {
            name: MpsControl(directories(directory)) for name, directory in self.daemons.items()
        }
        self._answered: dict[str, float] = {}
        self._faulty: dict[str, float] = {}
        self._missing: dict[tuple[str, str, int], float] = {}
        self._attached: set[tuple[str, str, int]] = set()

    def prepare(self, child: Child) -> None:
        """Before a daemon starts: private, empty directories. Raises OSError."""
        if child.plan.kind != "mps":
            return
        gpu = child.plan.gpus[0]
        directory = self.daemons[gpu]
        directory.mkdir(mode=0o700, exist_ok=True)
        for name in (PIPE, LOG):
            (directory / name).mkdir(mode=0o700, exist_ok=True)
        for left in (directory / PIPE).iterdir():
            left.unlink(missing_ok=True)
        self._answered[gpu] = time.monotonic()
        self._faulty.pop(gpu, None)

    def look(self, gpu: str, state: State, lanes: Mapping[str, Mapping[str, int]]) -> Seen:
        """`lanes`: by process and lane, the processes that must be clients. Blocks for seconds at most."""
        seen = Seen()
        if state not in (State.STARTING, State.READY):
            return seen
        control = self._controls[gpu]
        try:
            clients = control.clients()
            faulty = control.faulty()
        except MpsFailed as error:
            if time.monotonic() - self._answered[gpu] > _HUNG_SECONDS:
                seen.broken = str(error)
            return seen
        now = self._answered[gpu] = time.monotonic()
        seen.ready = True
        if not faulty:
            self._faulty.pop(gpu, None)
        elif now - self._faulty.setdefault(gpu, now) > self._plan.gpu(gpu).patience:
            seen.broken = f"MPS server {faulty[0]} stays in its fault: clients of before it are left"
        if self._plan.gpu(gpu).verify:
            seen.strays = self._strays(clients, lanes, now, self._plan.gpu(gpu).patience)
        return seen

    def attached(self, gpu: str, lanes: Mapping[str, Mapping[str, int]]) -> bool:
        """Whether all of these were seen as clients, or need not be."""
        return not self._plan.gpu(gpu).verify or _who(lanes) <= self._attached

    def _strays(
        self, clients: Mapping[int, int], lanes: Mapping[str, Mapping[str, int]], now: float, patience: float
    ) -> dict[str, str]:
        strays = {}
        expected = _who(lanes)
        self._missing = {who: since for who, since in self._missing.items() if who in expected}
        self._attached &= expected
        for who in expected - self._attached:
            name, lane, pid = who
            if pid in clients:
                self._attached.add(who)
                self._missing.pop(who, None)
            elif now - self._missing.setdefault(who, now) > patience:
                strays[name] = (
                    f"its {lane} lane ({pid}) is no client of the MPS daemon, so it runs without MPS; "
                    'look at the daemon\'s log, or say attach = "trust"'
                )
        return strays

    def quit(self, child: Child) -> bool:
        """Ask a daemon to end its servers and itself; whether it will."""
        try:
            self._controls[child.plan.gpus[0]].quit(_QUIT_SECONDS)
        except MpsFailed as error:
            child.reason = str(error)
            return False
        return True


def _who(lanes: Mapping[str, Mapping[str, int]]) -> set[tuple[str, str, int]]:
    return {(name, lane, pid) for name, pids in lanes.items() for lane, pid in pids.items()}


def sweep(directory: Path) -> None:
    """End a daemon that a killed launcher left behind, if there is one."""
    if (directory / PIPE).is_dir():
        try:
            MpsControl(directories(directory)).quit(_QUIT_SECONDS)
        except MpsFailed:
            return  # there is none


def set_compute_mode(uuid: str, mode: str) -> None:
    """`EXCLUSIVE_PROCESS`, `DEFAULT`, … Raises SpeclaneError."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-i", uuid, "-c", mode],
            capture_output=True,
            text=True,
            timeout=_SMI_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SpeclaneError(f"the compute mode of {uuid} cannot be set: {error}") from None
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())
        raise SpeclaneError(f"the compute mode of {uuid} cannot be set to {mode}: {said}")
