"""Where text and lanes appear while a command runs, whatever stdout and stderr are: terminals, pipes, files.

Text goes to stdout as it comes. Lanes are drawn on stderr if that is a terminal. If both are one terminal,
finished lines of text are printed above the lanes and the unfinished line is drawn with them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from executor.cli.output import write

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import RenderableType

    from executor.cli.lane_view import LaneView

_REDRAWS_PER_SECOND = 8


class Screen:
    """A context; inside it `text` may be called."""

    def __init__(self, lanes: LaneView, *, shows_text: bool) -> None:
        self._lanes = lanes
        self._tail = ""
        self._written = False
        self._shared = shows_text and sys.stdout.isatty() and sys.stderr.isatty()
        self._live: Live | None = None
        if sys.stderr.isatty():
            self._live = Live(
                console=Console(file=sys.stdout if self._shared else sys.stderr),
                get_renderable=self._drawn,
                refresh_per_second=_REDRAWS_PER_SECOND,
                transient=True,
                redirect_stdout=False,
            )

    def __enter__(self) -> Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        rest, self._tail = self._tail, ""
        if self._written:
            write(rest + "\n")

    def text(self, piece: str) -> None:
        """The next piece of text, which may end anywhere."""
        if not piece:
            return
        self._written = True
        if not self._shared or self._live is None:
            write(piece)
            return
        finished, newline, tail = (self._tail + piece).rpartition("\n")
        self._tail = tail
        if newline:
            self._live.console.print(Text(finished), soft_wrap=True)

    def _drawn(self) -> RenderableType:
        if not self._tail:
            return self._lanes
        console = self._console()
        room = max(1, console.height - self._lanes.height() - 1)
        lines = Text(self._tail).wrap(console, console.width)
        return Group(*lines[-room:], self._lanes)

    def _console(self) -> Console:
        assert self._live is not None, "drawn only by a live view"
        return self._live.console
