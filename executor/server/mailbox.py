"""From the coordinator's thread to the event loop: outputs cross in one go, however many come at once.

The coordinator never waits here: it leaves an output and, if nobody is on the way yet, rings once.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from executor.errors import SpeclaneError
    from executor.request import Completion, Delta

    Output = Delta | Completion | SpeclaneError


class Mailbox:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._left: deque[tuple[Callable[[Output], None], Output]] = deque()
        self._rung = False

    def slot(self, receive: Callable[[Output], None]) -> Slot:
        """Where a request puts its outputs; `receive` gets them in the event loop, in their order."""
        return Slot(self, receive)

    def leave(self, receive: Callable[[Output], None], output: Output) -> None:
        """In the coordinator's thread."""
        self._left.append((receive, output))
        if not self._rung:
            self._rung = True
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # Before the first look: what is left from now on rings again, or is found by this very loop.
        self._rung = False
        while self._left:
            receive, output = self._left.popleft()
            receive(output)


class Slot:
    """One request's `Outputs`."""

    __slots__ = ("_mailbox", "_receive")

    def __init__(self, mailbox: Mailbox, receive: Callable[[Output], None]) -> None:
        self._mailbox = mailbox
        self._receive = receive

    def put(self, output: Output, /) -> None:
        self._mailbox.leave(self._receive, output)
