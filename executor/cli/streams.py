"""The standard streams as commands can rely on them: all three are open, and none fails with a traceback.

Owns file descriptors 0 to 2. Must be asked before anything else opens files.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import TYPE_CHECKING

from executor.cli.output import note
from executor.cli.quitting import Quit
from executor.errors import SpeclaneError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def secure() -> None:
    """Make stdout tell in one line that it failed, and stderr not fail at all.

    Raises Quit if stdout is closed: better before a model is loaded than after.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # or else the next file to be opened got this number, and what is meant for stdout
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stderr = io.TextIOWrapper(io.BufferedWriter(_Stderr(2, "w", closefd=False)), line_buffering=True)
    if sys.stdout is None:
        note("error: stdout is closed; redirect it, for example to /dev/null")
        raise Quit(1)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Stdout(1, "w", closefd=False)),
        encoding=sys.stdout.encoding,
        line_buffering=sys.stdout.isatty(),
    )


class _Stdout(io.FileIO):
    def write(self, data: ReadableBuffer, /) -> int:
        """Raises Quit if the reader went away, SpeclaneError if it fails otherwise; but only once."""
        try:
            return super().write(data)
        except OSError as error:
            # What is still buffered is tried again, up to the interpreter's end, where nobody could catch it.
            with open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), self.fileno())
            if isinstance(error, BrokenPipeError):
                raise Quit.by_signal(signal.SIGPIPE) from None
            raise SpeclaneError(f"stdout cannot be written: {error.strerror}") from None


class _Stderr(io.FileIO):
    def write(self, data: ReadableBuffer, /) -> int:
        """What nobody can read is lost, but not the command's result."""
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes
