"""What HTTP costs: how much later a client has a token than the coordinator, and the CPU time that takes.

The client is a process of its own; both ends read the same monotonic clock. Lanes are toys whose steps take
as long as those of a real model, but asleep: what is measured is the server, not the want of cores.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from contextlib import closing
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from executor.bench.percentile import percentile
from executor.config import Config
from executor.errors import SpeclaneError
from executor.llm import LLM
from executor.request import Delta
from executor.sampling import SamplingParams
from executor.server.options import ServerOptions
from executor.server.serving import Server, bind, url_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from executor.request import Completion, Outputs

_CLIENT_SECONDS = 600.0
_PROMPT = "http"


class _Stamped:
    """Outputs that note when each delta was given out, before they pass it on."""

    def __init__(self, outputs: Outputs, stamps: list[int]) -> None:
        self._outputs = outputs
        self._stamps = stamps

    def put(self, output: Delta | Completion | SpeclaneError, /) -> None:
        if isinstance(output, Delta):
            self._stamps.append(time.monotonic_ns())
        self._outputs.put(output)


class _StampedLLM(LLM):
    """`stamps` by seed, in nanoseconds of the monotonic clock."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.stamps: dict[int, list[int]] = {}

    def submit(self, tokens: Sequence[int], params: SamplingParams, outputs: Outputs) -> Callable[[], None]:
        assert params.seed is not None, "the bench gives one"
        stamps = self.stamps[params.seed] = []
        return super().submit(tokens, params, _Stamped(outputs, stamps))


def measure(*, streams: int, tokens: int, k: int, step_ms: float) -> dict[str, Any]:
    """`streams` at once, each of so many tokens, first without HTTP, then with it.

    delay_ms: from the coordinator's giving out a delta to the client's having read it. cpu_us_per_token: what
    the serving process computes more than without HTTP, for each token.
    """
    toy = f"vocabulary=256,context={tokens + len(_PROMPT) + 2},step_ms={step_ms:g}"
    config = Config(
        engine="toy",
        target=toy,
        speculator=f"vocabulary=256,context={tokens + len(_PROMPT) + 2},agree=0.8",
        num_speculative_tokens=k,
        max_sequences=streams,
        threads=1,
    )
    with closing(_StampedLLM(config)) as llm:
        llm.start()
        _directly(llm, streams, min(tokens, 20))  # a warm-up
        began, cpu = time.perf_counter(), time.process_time()
        _directly(llm, streams, tokens)
        direct_seconds, direct_cpu = time.perf_counter() - began, time.process_time() - cpu
        llm.stamps.clear()
        received, seconds, served_cpu = _over_http(llm, streams, tokens)
    delays = [
        (there - given) / 1e6
        for seed, arrivals in received.items()
        for given, there in zip(llm.stamps[int(seed)], arrivals, strict=True)
    ]
    total = streams * tokens
    return {
        "streams": streams,
        "tokens": total,
        "k": k,
        "step_ms": step_ms,
        "delay_ms": {"p50": round(percentile(delays, 0.5), 3), "p99": round(percentile(delays, 0.99), 3)},
        "cpu_us_per_token": round((served_cpu - direct_cpu) / total * 1e6, 2),
        "tok_s": {"direct": round(total / direct_seconds, 1), "http": round(total / seconds, 1)},
    }


def _params(seed: int, tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, seed=seed, max_tokens=tokens)


def _directly(llm: _StampedLLM, streams: int, tokens: int) -> None:
    outputs: SimpleQueue[Any] = SimpleQueue()
    prompt = llm.encode(_PROMPT)
    for seed in range(streams):
        llm.submit(prompt, _params(seed, tokens), outputs)
    open_ = streams
    while open_:
        output = outputs.get()
        if isinstance(output, SpeclaneError):
            raise output
        open_ -= not isinstance(output, Delta)


def _over_http(llm: _StampedLLM, streams: int, tokens: int) -> tuple[dict[str, list[int]], float, float]:
    """When each stream's deltas arrived, by seed; seconds; this process's CPU seconds."""
    options = ServerOptions(port=0)
    bound = bind(options)
    listening = threading.Event()
    server = Server(llm, options, bound, listening.set)
    thread = threading.Thread(target=server.run, name="speclane-http")
    thread.start()
    try:
        if not listening.wait(_CLIENT_SECONDS):
            raise SpeclaneError("the server does not listen")
        command = [sys.executable, "-m", "executor.bench.http_client", url_of(bound)]
        client = subprocess.Popen(
            [*command, _PROMPT, str(streams), str(tokens)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with client:
            assert client.stdout is not None, "it was asked for"
            client.stdout.readline()  # it has imported what it needs and connected
            began, cpu = time.perf_counter(), time.process_time()
            output, _ = client.communicate("go\n", _CLIENT_SECONDS)
            seconds, spent = time.perf_counter() - began, time.process_time() - cpu
        if client.returncode:
            raise SpeclaneError("the client of the bench failed; it said why above")
    finally:
        server.stop()
        thread.join()
    return json.loads(output), seconds, spent
