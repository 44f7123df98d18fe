"""Becomes another program that the kernel sends SIGTERM when its parent thread ends, however that ends.

Run as a script: `tether.py PARENT COMMAND …`. The wish survives becoming the other program. The child makes
it by itself, since code between fork and exec is not safe where the parent has threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the wish was made
        sys.exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be run: {error.strerror}\n")
        sys.exit(127)


if __name__ == "__main__":
    main()
