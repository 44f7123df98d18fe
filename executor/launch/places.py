"""The directories of one launch: a private one for sockets that goes with it, and one for what stays.

The private one has a fixed name, so it is also what keeps a topology from running twice.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs

from executor.errors import InvalidConfig, SpeclaneError
from executor.rundir import bases

if TYPE_CHECKING:
    from collections.abc import Mapping

_PREFIX = "speclane.launch."
LOCK, NOTIFY = "lock", "notify"


def directory_of(topology: str) -> Path:
    """Where the sockets of a topology of this name will be."""
    return bases()[0] / f"{_PREFIX}{topology}"


def state_directory(given: str | None, topology: str) -> Path:
    """Where status and logs are to be kept: as given, else as systemd says, else in the user's own place."""
    from executor.config import local_path

    if given is not None:
        return local_path("state", given, "./state")
    told = os.environ.get("STATE_DIRECTORY", "").split(":")[0]
    return (Path(told) if told else platformdirs.user_state_path("speclane")) / topology


class PrivateDirectory:
    def __init__(self, path: Path) -> None:
        """Takes it; what a killed launcher left in it is removed. Raises SpeclaneError if it is in use."""
        self.path = path
        try:
            with suppress(FileExistsError):
                path.mkdir(mode=0o700)
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                raise SpeclaneError(
                    f"{path} is somebody else's; set XDG_RUNTIME_DIR to a directory of your own"
                )
            path.chmod(0o700)
            flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
            self._lock = os.open(path / LOCK, flags, 0o600)
        except OSError as error:
            raise InvalidConfig(
                "XDG_RUNTIME_DIR",
                f"no directory for sockets can be made at {path} ({error.strerror}); "
                "set XDG_RUNTIME_DIR to a directory you can write, such as /tmp",
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise SpeclaneError(
                f"a topology of this name runs already (its lock is {path / LOCK}); end it, or change `name`"
            ) from None

    def leftovers(self) -> list[Path]:
        """What a launcher that was killed left here."""
        return sorted(entry for entry in self.path.iterdir() if entry.name != LOCK)

    def clear(self) -> None:
        for entry in self.leftovers():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


class StateDirectory:
    def __init__(self, path: Path) -> None:
        """Raises InvalidConfig if it cannot be written, or is another launch's."""
        self.path = path
        self.status_file = path / "status.json"
        try:
            (path / "logs").mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._take()
            self.write({})
        except OSError as error:
            raise InvalidConfig(
                "state", f"state directory {path} cannot be written: {error.strerror}; try --state ./state"
            ) from None

    def _take(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise InvalidConfig(
                "state",
                f"state directory {self.path} is that of another launch, which runs; "
                f"try --state {self.path}-2",
            ) from None
        except OSError:
            return  # of a file system without locks

    def close(self) -> None:
        """What was written stays."""
        os.close(self._lock)

    def log(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    def write(self, status: Mapping[str, Any]) -> None:
        """At once or not at all, for whoever reads it meanwhile. Raises OSError."""
        partial = self.status_file.with_suffix(".partial")
        partial.write_text(json.dumps(status, indent=2) + "\n")
        partial.replace(self.status_file)
