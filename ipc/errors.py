"""What can go wrong on the wire."""

from __future__ import annotations


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
