"""Arena memory of CPUs: a memfd. It has no name, ends with its last holder, and cannot shrink under a reader.

The exporter alone may write: whoever maps the file after it was sealed maps it for reading.
"""

from __future__ import annotations

import fcntl
import mmap
import os

from ipc import host_memory
from ipc.errors import ArenaError

NAME = "speclane-arena"
"""How the mappings are called in /proc/PID/maps."""
_F_SEAL_FUTURE_WRITE = 0x0010
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class MemfdMemory:
    """The exporter's end. `fd` is what an importer needs; it may be closed once it was passed on."""

    def __init__(self, nbytes: int) -> None:
        """Raises ArenaError if there is not so much memory."""
        if nbytes > (available := host_memory.available()):
            # The kernel would not refuse it, but end processes until it fits.
            raise ArenaError(f"no memfd of {nbytes} bytes: {available} are available")
        try:
            self.fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise ArenaError(f"no memfd: {error.strerror}") from error
        try:
            # Else the size is a promise only, and the first write beyond what there is a SIGBUS.
            os.posix_fallocate(self.fd, 0, nbytes)
            self._map = mmap.mmap(self.fd, nbytes)
            self._seal()
        except (OSError, ValueError) as error:
            os.close(self.fd)
            reason = error.strerror if isinstance(error, OSError) else error
            raise ArenaError(f"no memfd of {nbytes} bytes: {reason}") from error
        self._view = memoryview(self._map)

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        source = memoryview(data).cast("B")
        self._view[offset : offset + len(source)] = source

    def span(self, offset: int, nbytes: int) -> memoryview:
        """For writing, in place."""
        return self._view[offset : offset + nbytes]

    def synchronise(self) -> None:
        """A CPU's writes are done when they return; the message that follows is the barrier."""

    def forget_fd(self) -> None:
        """It was passed on."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def close(self) -> bool:
        """Whether it is closed; it is not while spans of it are held, but may be tried again."""
        self.forget_fd()
        return _close(self._map, self._view)

    def _seal(self) -> None:
        try:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | _F_SEAL_FUTURE_WRITE)
        except OSError:  # a kernel before 5.1
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SIZE_SEALS)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)


class MappedMemfd:
    """An importer's end, read-only."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Takes the descriptor over. Raises ArenaError for a file that could be cut while it is read."""
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            size = os.fstat(fd).st_size
            if seals & _SIZE_SEALS != _SIZE_SEALS or size != nbytes:
                raise ArenaError(f"a memfd of {size} bytes with seals {seals:#x}, {nbytes} were announced")
            self._map = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise ArenaError(f"memfd of {nbytes} bytes cannot be mapped: {error}") from error
        finally:
            os.close(fd)
        self._view = memoryview(self._map)

    def span(self, offset: int, nbytes: int) -> memoryview:
        return self._view[offset : offset + nbytes]

    def read(self, offset: int, nbytes: int) -> bytes:
        return bytes(self._view[offset : offset + nbytes])

    def synchronise(self) -> None:
        """What a CPU read, it has read."""

    def close(self) -> bool:
        """Whether it is unmapped; it is not while spans of it are held, but may be tried again."""
        return _close(self._map, self._view)


def _close(mapped: mmap.mmap, view: memoryview) -> bool:
    try:
        view.release()
        mapped.close()
    except BufferError:
        return False
    return True
