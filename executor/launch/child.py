"""One process of a topology, over all its incarnations: its state, what it says of itself, its log.

Decides nothing. Must be used by a thread that lives as long as the processes: their SIGTERM on its end is
tied to it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from executor import notify
from executor.process import describe_exit
from executor.restart import RestartHistory, RestartPolicy
from ipc.table import Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from executor.launch.plan import PlannedProcess

_TETHER = Path(__file__).with_name("tether.py")
_LOG_BYTES = 16 << 20
_LAST_LINE_BYTES = 8192
_NO_MERCY_SECONDS = 2.0


class State(StrEnum):
    WAITING = "waiting"
    """For its first start, for what it needs, or for its next try."""
    STARTING = "starting"
    READY = "ready"
    ENDING = "ending"
    """Hangs, or has to start again, and is being ended."""
    STOPPING = "stopping"
    """Was told to drain."""
    STOPPED = "stopped"
    FAILED = "failed"
    """Died too often, or at its first start."""


class Event(StrEnum):
    STARTED = "started"
    READY = "ready"
    CONDEMNED = "condemned"
    STOP = "stop"
    DIED = "died"
    GIVEN_UP = "given up"


_S, _E = State, Event

CHILD_TABLE: Table[State, Event] = Table(
    "process",
    {
        (_S.WAITING, _E.STARTED): _S.STARTING,
        (_S.WAITING, _E.GIVEN_UP): _S.FAILED,
        (_S.WAITING, _E.STOP): _S.STOPPED,
        (_S.STARTING, _E.READY): _S.READY,
        (_S.STARTING, _E.CONDEMNED): _S.ENDING,
        (_S.STARTING, _E.STOP): _S.STOPPING,
        (_S.STARTING, _E.DIED): _S.WAITING,
        (_S.READY, _E.CONDEMNED): _S.ENDING,
        (_S.READY, _E.STOP): _S.STOPPING,
        (_S.READY, _E.DIED): _S.WAITING,
        (_S.ENDING, _E.READY): _S.ENDING,
        (_S.ENDING, _E.CONDEMNED): _S.ENDING,
        (_S.ENDING, _E.STOP): _S.STOPPING,
        (_S.ENDING, _E.DIED): _S.WAITING,
        (_S.STOPPING, _E.READY): _S.STOPPING,
        (_S.STOPPING, _E.CONDEMNED): _S.STOPPING,
        (_S.STOPPING, _E.STOP): _S.STOPPING,
        (_S.STOPPING, _E.DIED): _S.STOPPED,
        (_S.STOPPED, _E.STOP): _S.STOPPED,
        (_S.FAILED, _E.STOP): _S.FAILED,
    },
)


class Child:
    """Times are of time.monotonic. `facts`: what this incarnation said of itself, by the notify protocol."""

    def __init__(self, plan: PlannedProcess, policy: RestartPolicy, log: Path) -> None:
        """`log`: the file that it writes to."""
        self.plan = plan
        self.name = plan.name
        self.log = log
        self.state = State.WAITING
        self.facts: dict[str, str] = {}
        self.history = RestartHistory(policy)
        self.pidfd: int | None = None
        self.starts = 0
        self.due = 0.0
        """When it may be started."""
        self.started_at = 0.0
        self.heard_at = 0.0
        self.reason = ""
        """Why it is being ended, or how it ended last."""
        self.exit_status: int | None = None
        self.was_killed = False
        """Whether it had to be, after it was told to end."""
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._popen.pid if self._popen is not None else None

    @property
    def healthy(self) -> bool:
        return self.state is State.READY and self.facts.get(notify.HEALTH, "healthy") == "healthy"

    def step(self, event: Event) -> None:
        self.state = CHILD_TABLE.step(self.state, event)

    def start(self, argv: Sequence[str], environment: dict[str, str]) -> None:
        """`environment`: beside this process's own and the planned one. Raises OSError."""
        with suppress(FileNotFoundError):
            if self.log.stat().st_size > _LOG_BYTES:
                self.log.replace(self.log.with_suffix(".log.1"))
        tether = (sys.executable, "-I", "-S", str(_TETHER), str(os.getpid()))
        with self.log.open("ab") as log:
            log.write(f"--- {time.strftime('%Y-%m-%dT%H:%M:%S%z')} start {self.starts + 1}\n".encode())
            log.flush()
            popen = subprocess.Popen(
                [*tether, *argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(self.plan.environment, environment),
                start_new_session=True,  # the terminal's Ctrl-C is the launcher's to pass on
            )
        try:
            self.pidfd = os.pidfd_open(popen.pid)
        except OSError:  # for want of descriptors
            popen.kill()
            popen.wait()
            raise
        self._popen = popen
        self.facts, self.reason, self.was_killed = {}, "", False
        self.starts += 1
        self.started_at = self.heard_at = time.monotonic()
        self.step(Event.STARTED)

    def signal(self, number: signal.Signals) -> None:
        """To its process, if there is one."""
        if self.pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        self.was_killed = True
        self.signal(signal.SIGKILL)

    def reap(self) -> str:
        """Its process has ended: free what was held for it, and say how it ended."""
        assert self._popen is not None, "only what was started can end"
        assert self.pidfd is not None, "as above"
        self.exit_status = self._popen.wait(_NO_MERCY_SECONDS)
        os.close(self.pidfd)
        self._popen, self.pidfd = None, None
        ended = describe_exit(self.exit_status)
        self.reason = f"{self.reason}; {ended}" if self.reason else ended
        return self.reason

    def last_line(self) -> str:
        """What it wrote last, if that can be read."""
        lines: list[str] = []
        with suppress(OSError), self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LAST_LINE_BYTES))
            lines = log.read().decode(errors="replace").split("\n--- ")[-1].splitlines()[1:]
        return next((line for line in reversed(lines) if line.strip()), "")


def _environment(planned: Mapping[str, str], notify_variables: Mapping[str, str]) -> dict[str, str]:
    """What was said to this process by whoever started it is not said to its children."""
    inherited = {name: value for name, value in os.environ.items() if name not in notify.NOTIFY_VARIABLES}
    return inherited | dict(planned) | dict(notify_variables)
