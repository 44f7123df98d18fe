"""A private directory for one executor's sockets and lock, which leaves nothing behind.

A directory whose owner was killed is swept by the next start: its lock is free, and only then.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

from executor.errors import InvalidConfig

RANKS = "ranks-"
"""How a directory in it begins where the ranks of one lane meet; its epoch follows."""
CONTROL = "control"
"""Name of the socket in it that a running executor is controlled by."""

_PREFIX = "speclane-"
_MEETING = re.compile(f"{RANKS}[0-9a-f]+")
_CONTENTS = {"lock", "hub", CONTROL}


class RunDir:
    def __init__(self) -> None:
        """Raises InvalidConfig if no directory can be made."""
        base = bases()[0]
        try:
            sweep(base)
            while not self._claim(base):
                pass
        except OSError as error:
            raise InvalidConfig(
                "XDG_RUNTIME_DIR",
                f"no socket directory can be made in {base} ({error.strerror}); "
                "set XDG_RUNTIME_DIR or TMPDIR to a directory you can write, such as /tmp",
            ) from error

    def _claim(self, base: Path) -> bool:
        """Make and lock a directory; False if another executor's sweep took it for abandoned in between."""
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))  # mode 0700
        try:
            self._lock = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError:
            self.path.rmdir()
            raise
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        if (self.path / "lock").exists():
            return True
        os.close(self._lock)
        return False

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def bases() -> list[Path]:
    """Where run directories may be: the first is where a new one is made."""
    given = os.environ.get("XDG_RUNTIME_DIR")
    places = [Path(given)] if given else []
    return [*places, Path(tempfile.gettempdir())]


def control_sockets() -> list[Path]:
    """Of all executors, other users' and dead ones included."""
    return [path for base in dict.fromkeys(bases()) for path in sorted(base.glob(f"{_PREFIX}*/{CONTROL}"))]


def sweep(base: Path) -> None:
    """Remove what dead executors of this user left, and nothing else that may be called like it."""
    for directory in base.glob(f"{_PREFIX}*"):
        try:
            if not _ours(directory):
                continue
            lock = os.open(directory / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # another user's, or one just being made
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name in _CONTENTS:
                (directory / name).unlink(missing_ok=True)
            for meeting in directory.glob(f"{RANKS}*"):
                shutil.rmtree(meeting)
            directory.rmdir()
        except OSError:
            pass  # its owner lives, or somebody has put something else into it
        finally:
            os.close(lock)


def _ours(directory: Path) -> bool:
    status = directory.lstat()
    private = stat.S_ISDIR(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o700
    names = {name for name in os.listdir(directory) if not _MEETING.fullmatch(name)}
    return private and status.st_uid == os.geteuid() and names <= _CONTENTS
