"""A speculator server as a process, for tests, and executors that attach to it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from executor import LLM
from executor.bench.pool import server_process

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

TARGET = "vocabulary=256,step_ms=2"
DRAFT = "vocabulary=256,agree=0.8"


@contextmanager
def server(
    bind: str, *options: str, speculator: str = DRAFT, clients: int = 3
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Its address and process, once it serves."""
    given = ("--engine=toy", f"--speculator={speculator}", "--threads=1", f"--clients={clients}", *options)
    with server_process(bind, given) as (address, process):
        yield address, process


def attached(address: str, target: str = TARGET, **options) -> LLM:
    """Not started."""
    return LLM(engine="toy", target=target, speculator=address, threads=1, **options)
