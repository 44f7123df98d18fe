"""Whether enough open files are left. Asked before: libzmq aborts the process for want of one."""

from __future__ import annotations

import os
import resource
from contextlib import ExitStack

from executor.errors import SpeclaneError


def require(count: int) -> None:
    """Raises SpeclaneError if this process can open fewer than `count` more files."""
    with ExitStack() as opened:
        try:
            for _ in range(count):
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise SpeclaneError(
                f"{error.strerror}: fewer than {count} of the limit of {limit} are left; "
                f"raise it, for example with `ulimit -n {2 * limit}`"
            ) from error
