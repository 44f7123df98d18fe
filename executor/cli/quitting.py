"""How the command line is left early: signals and a reader that went away, each with its exit status."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from executor.errors import SpeclaneError

if TYPE_CHECKING:
    from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_AGAIN_SECONDS = 0.01


class Quit(BaseException):
    """Leave now, quietly. No Exception and no KeyboardInterrupt, so that nobody catches it for one."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status

    @classmethod
    def by_signal(cls, number: int) -> Quit:
        """The status that a shell reports for a process ended by this signal."""
        return cls(128 + number)


def on_signals() -> None:
    """SIGINT, SIGTERM and SIGHUP raise Quit in the main thread, unless they were ignored (nohup)."""
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _quit)
    sys.unraisablehook = _unraisable


def settle() -> None:
    """Make sure that the interpreter's own end is as quiet."""
    for number in (*_SIGNALS, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    with suppress(Quit, SpeclaneError):  # of stdout, which then does not fail again
        if sys.stdout is not None:
            sys.stdout.flush()


def _quit(number: int, _frame: FrameType | None) -> NoReturn:
    raise Quit.by_signal(number)


def _unraisable(lost: sys.UnraisableHookArgs) -> None:
    """A signal came while a destructor or an import's callback ran, whose exceptions Python drops."""
    if not isinstance(lost.exc_value, Quit):
        sys.__unraisablehook__(lost)
        return
    again = lost.exc_value

    def quit_again(_number: int, _frame: FrameType | None) -> NoReturn:
        raise again

    signal.signal(signal.SIGALRM, quit_again)
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
