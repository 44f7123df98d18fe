"""What the supervisor needs of whatever runs a lane: a process of its own, or a thread of this one."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ipc.lifeline import Lifeline


class Worker(Protocol):
    @property
    def pid(self) -> int:
        """Of the process that it runs in; of several, of the one that speaks."""
        ...

    @property
    def pids(self) -> tuple[int, ...]:
        """Of all processes that it runs in."""
        ...

    @property
    def pidfd(self) -> int:
        """Becomes readable when the worker has ended."""
        ...

    @property
    def lifeline(self) -> Lifeline | None:
        """By which files go to the worker and come from it; None if there is no such way."""
        ...

    def kill(self, number: signal.Signals = signal.SIGKILL) -> bool:
        """Whether there was somebody to take the signal. May be called from any thread."""
        ...

    def wait(self, deadline: float) -> int | None:
        """The exit status (negative: the signal), or None if it still runs at `deadline` (time.monotonic)."""
        ...

    def describe_exit(self, status: int) -> str:
        """How it ended, in words; `status` as `wait` returned it."""
        ...

    def stderr_tail(self) -> str:
        """The last lines that the worker wrote, as far as they are its own."""
        ...

    def trim_stderr(self) -> None:
        """Once it has written too much to keep, forget all but the last lines."""
        ...

    def close(self) -> None:
        """Ends the worker if it still runs, and frees all that was held for it."""
        ...
