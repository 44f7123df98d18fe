"""speclane's executor: speculative decoding with each lane in its own process.

Names are imported at their first use, so that a command line that only shows its help does not wait for
tokenizers and numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from executor.config import Config, Recovery, Timeouts
    from executor.errors import (
        Closed,
        InvalidConfig,
        InvalidRequest,
        LaneFailed,
        RequestFailed,
        SpeclaneError,
    )
    from executor.grammar import Grammar
    from executor.health import Health
    from executor.llm import LLM
    from executor.request import Completion, Delta
    from executor.restart import RestartPolicy
    from executor.sampling import SamplingParams
    from executor.stream import Stream

__all__ = [
    "LLM",
    "Closed",
    "Completion",
    "Config",
    "Delta",
    "Grammar",
    "Health",
    "InvalidConfig",
    "InvalidRequest",
    "LaneFailed",
    "Recovery",
    "RequestFailed",
    "RestartPolicy",
    "SamplingParams",
    "SpeclaneError",
    "Stream",
    "Timeouts",
]

_HOMES = {
    "config": ("Config", "Recovery", "Timeouts"),
    "errors": ("Closed", "InvalidConfig", "InvalidRequest", "LaneFailed", "RequestFailed", "SpeclaneError"),
    "grammar": ("Grammar",),
    "health": ("Health",),
    "llm": ("LLM",),
    "request": ("Completion", "Delta"),
    "restart": ("RestartPolicy",),
    "sampling": ("SamplingParams",),
    "stream": ("Stream",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"executor.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
