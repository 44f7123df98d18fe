"""What can go wrong on the wire."""

from __future__ import annotations

from typing import Literal


class WireError(Exception):
    """Base of all errors of the wire."""


class MalformedFrame(WireError):
    """A frame is not a well-formed message of the expected direction."""


class ProtocolError(WireError):
    """A well-formed message came in a state in which it is not legal, or contradicts what is known."""


class PeerGone(WireError):
    """The other end does not take messages any more."""


class RankGone(PeerGone):
    """Another rank of this lane does not take part any more."""


RANK_GONE_STATUS = 7
"""Exit status of a rank that ended because another one did: the cause is to be sought there."""


class ArenaError(WireError):
    """Shared tensor memory cannot be had, or cannot be reached."""


class BadDescriptor(ArenaError):
    """A descriptor contradicts what its arena is known to be; no tensor was made of it."""


CudaIpcObstacle = Literal[
    "no_bindings",
    "no_device",
    "wsl2",
    "mig",
    "pid_namespace",
    "same_process",
    "device_not_visible",
    "not_exportable",
    "driver",
]


class CudaIpcUnavailable(ArenaError):
    """CUDA memory cannot be shared between these processes; `obstacle` says why, for machines."""

    def __init__(self, obstacle: CudaIpcObstacle, message: str) -> None:
        super().__init__(message)
        self.obstacle: CudaIpcObstacle = obstacle
