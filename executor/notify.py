"""What a service says of itself: readiness, health and signs of life, as systemd's notify protocol has it.

One datagram of `KEY=value` lines to the socket in $NOTIFY_SOCKET; whoever started the service reads it, be it
systemd or `speclane launch`. Without that variable nothing is said.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

SOCKET, WATCHDOG_USEC, WATCHDOG_PID = NOTIFY_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")

READY, STATUS, STOPPING, WATCHDOG = "READY", "STATUS", "STOPPING", "WATCHDOG"
EXTEND = "EXTEND_TIMEOUT_USEC"
"""What has begun may take so long, whatever the unit says."""
HEALTH, URL, LANES = "X_SPECLANE_HEALTH", "X_SPECLANE_URL", "X_SPECLANE_LANES"
"""Our own: state of health, address, and `lane:pid` of each lane's process (`target/1` of its next rank)."""


class Notifier:
    """Says only what has changed, but for signs of life. Never raises: who is not heard still serves."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = environment.get(SOCKET, "")
        self._said: dict[str, str] = {}
        self.watchdog_seconds = _watchdog_seconds(environment) if self._address else None
        """A sign of life is expected so often; None: not at all."""

    def say(self, **facts: str) -> None:
        """`say(READY="1", STATUS="serving")`: in one message, what has not been said already."""
        news = {key: value for key, value in facts.items() if self._said.get(key) != value}
        if news and self._send(news):
            self._said |= news

    def alive(self) -> None:
        """A sign of life."""
        self._send({WATCHDOG: "1"})

    def _send(self, facts: Mapping[str, str]) -> bool:
        if not self._address:
            return True
        lines = "\n".join(f"{key}={' '.join(value.split())}" for key, value in facts.items())
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(lines.encode(), address)
            return True
        return False


def parse(datagram: bytes) -> dict[str, str]:
    """What a service said; lines that are none are dropped."""
    lines = datagram.decode(errors="replace").splitlines()
    pairs = (line.partition("=") for line in lines)
    return {key: value for key, equals, value in pairs if key and equals}


def _watchdog_seconds(environment: Mapping[str, str]) -> float | None:
    pid, microseconds = environment.get(WATCHDOG_PID), environment.get(WATCHDOG_USEC, "")
    if pid not in (None, str(os.getpid())) or not microseconds.isascii() or not microseconds.isdigit():
        return None
    return int(microseconds) / 1e6 or None
