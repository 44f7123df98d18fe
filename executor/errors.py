"""Errors that a caller sees. Each message is one line that names what is wrong and a value that works."""

from __future__ import annotations


class SpeclaneError(Exception):
    """Base of all errors of the executor."""


class InvalidConfig(SpeclaneError):
    """An option cannot work; `field` names it. Raised before anything is loaded where that is possible."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class InvalidRequest(SpeclaneError):
    """A request cannot be served as asked; `field` names the culprit. Other requests are not affected."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class LaneFailed(SpeclaneError):
    """A worker died, hung or refused; `stderr_tail` holds its last lines."""

    def __init__(self, lane: str, reason: str, stderr_tail: str = "") -> None:
        super().__init__(f"{lane} lane failed: {reason}")
        self.lane = lane
        self.reason = reason
        self.stderr_tail = stderr_tail


class RequestFailed(SpeclaneError):
    """A request was given up, alone: the target died each time that it was verified."""


class Closed(SpeclaneError):
    """The executor was closed while, or before, the request ran."""
