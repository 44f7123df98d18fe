"""`speclane`, or `python -m executor`: the command line's entry. Everything else is in executor.cli."""

from __future__ import annotations

import sys
from typing import NoReturn

from executor.cli import quitting


def main() -> NoReturn:
    """Runs the command in sys.argv and exits: 0 done, 1 failed, 2 bad input, 128 + n ended by signal n."""
    try:
        quitting.on_signals()  # before the slow imports: an early Ctrl-C is no traceback either
        from executor.cli import streams

        streams.secure()
        from executor.cli.run import run

        status = run(sys.argv[1:])
    except quitting.Quit as quit_:
        status = quit_.status
    quitting.settle()
    sys.exit(status)


if __name__ == "__main__":
    main()
