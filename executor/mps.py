"""NVIDIA's Multi-Process Service: its variables, and its control daemon's text protocol.

A command is a line to the standard input of `nvidia-cuda-mps-control`, which finds the daemon by
$CUDA_MPS_PIPE_DIRECTORY; the answer is what it prints. Every question has a deadline: a daemon may hang.
"""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

from executor.errors import SpeclaneError

if TYPE_CHECKING:
    from collections.abc import Mapping
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
