"""NVIDIA's Multi-Process Service: its variables, and its control daemon's text protocol.

A command is a line to the standard input of `nvidia-cuda-mps-control`, which finds the daemon by
$CUDA_MPS_PIPE_DIRECTORY; the answer is what it prints. Every question has a deadline: a daemon may hang.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading
from typing import TYPE_CHECKING

from executor.errors import SpeclaneError
from executor.events import record

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Mapping
    from pathlib import Path

PROGRAM = "nvidia-cuda-mps-control"
DAEMON = (PROGRAM, "-f")
"""In the foreground, so that whoever starts it owns it."""
CONTROL = "control"
"""The daemon's socket in its pipe directory."""
PIPE, LOG = "p", "l"
"""Short: a socket's whole path has at most 107 bytes."""
PIPE_VARIABLE, LOG_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_MIB = 1 << 20
_PARTING_SECONDS = 1.0


class MpsFailed(SpeclaneError):
    """The daemon is not there, does not answer, or answers what is none."""


def directories(directory: Path) -> dict[str, str]:
    """What daemon and clients must agree on."""
    return {PIPE_VARIABLE: str(directory / PIPE), LOG_VARIABLE: str(directory / LOG)}


def share(percentage: int | None, memory: int | None, *, below_normal: bool) -> dict[str, str]:
    """A client's part of its only GPU; read before CUDA starts. `memory`: bytes."""
    variables = {}
    if percentage is not None:
        variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(percentage)
    if memory is not None:
        variables["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={max(1, memory // _MIB)}M"
    if below_normal:
        variables["CUDA_MPS_CLIENT_PRIORITY"] = "1"
    return variables


class MpsControl:
    """Asks one daemon. Knows no lanes; starts and ends no daemon."""

    def __init__(self, environment: Mapping[str, str], seconds: float = 5.0) -> None:
        """`environment`: of `directories`. `seconds`: that an answer may take."""
        self._environment = environment
        self._seconds = seconds

    def ask(self, command: str, seconds: float | None = None) -> str:
        """The answer, as it is. Raises MpsFailed."""
        limit = self._seconds if seconds is None else seconds
        try:
            done = subprocess.run(
                [PROGRAM],
                input=command + "\n",
                env=os.environ | self._environment,
                capture_output=True,
                text=True,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise MpsFailed(f"the MPS daemon gave no answer to {command!r} within {limit:g} s") from None
        except OSError as error:
            raise MpsFailed(f"{PROGRAM} cannot be run: {error.strerror}") from None
        if done.returncode != 0:
            said = " ".join((done.stderr or done.stdout).split()) or f"exit status {done.returncode}"
            raise MpsFailed(f"the MPS daemon refused {command!r}: {said}")
        return done.stdout

    def servers(self) -> list[int]:
        """Process ids of the servers; none before the first client. Raises MpsFailed."""
        return self._numbers("get_server_list")

    def clients(self) -> dict[int, int]:
        """The server of each client, both by process id. Raises MpsFailed."""
        return {
            client: server
            for server in self.servers()
            for client in self._numbers(f"get_client_list {server}")
        }

    def faulty(self) -> list[int]:
        """Servers that, after a GPU fault, take no new clients until all old ones are gone.

        Raises MpsFailed.
        """
        return [
            server for server in self.servers() if "FAULT" in self.ask(f"get_server_status {server}").upper()
        ]

    def terminate(self, client: int) -> bool:
        """Let a client's work on the GPU end, before its process is killed; whether it was a client.

        Raises MpsFailed.
        """
        server = self.clients().get(client)
        if server is None:
            return False
        self.ask(f"terminate_client {server} {client}")
        return True

    def quit(self, seconds: float) -> None:
        """End servers and daemon, giving clients so long. Raises MpsFailed."""
        self.ask(f"quit -t {max(1, round(seconds))}", seconds + self._seconds)

    def _numbers(self, command: str) -> list[int]:
        answer = self.ask(command)
        try:
            return [int(line) for line in answer.split()]
        except ValueError:
            raise MpsFailed(f"the MPS daemon answered {command!r} with {answer.strip()[:80]!r}") from None


def parting(
    environment: Mapping[str, str], pid: int, send: Callable[[signal.Signals], object]
) -> Parting | None:
    """For a process with this environment; None if it is no client of MPS."""
    if PIPE_VARIABLE not in environment:
        return None
    return Parting(MpsControl(environment, _PARTING_SECONDS), pid, send)


class Parting:
    """How a client of MPS is ended: killing one whose work is on the GPU can wedge the server for all others,
    so the daemon is asked to end its work first. That takes a thread, since no round may wait for it."""

    def __init__(self, control: MpsControl, pid: int, send: Callable[[signal.Signals], object]) -> None:
        """`send`: a signal to the client; may be called when it is gone."""
        self._control = control
        self._pid = pid
        self._send = send
        self._numbers: list[signal.Signals] = []
        self._lock = threading.Lock()
        self._parted = False
        self._thread: threading.Thread | None = None

    def then(self, number: signal.Signals) -> None:
        """Send this when the daemon has been asked, whatever it said. May be called from any thread."""
        with self._lock:
            if self._parted:
                self._send(number)
                return
            self._numbers.append(number)
            if self._thread is None:
                self._thread = threading.Thread(target=self._part, name="speclane-parting", daemon=True)
                self._thread.start()

    def _part(self) -> None:
        outcome = "terminated"
        try:
            if not self._control.terminate(self._pid):
                outcome = "was no client"
        except MpsFailed as error:
            outcome = str(error)
        record(logging.INFO, "mps_client_parted", pid=self._pid, outcome=outcome)
        with self._lock:
            self._parted = True
            for number in self._numbers:
                self._send(number)

    def close(self) -> None:
        """The client is gone."""
        if self._thread is not None:
            self._thread.join(4 * _PARTING_SECONDS)
