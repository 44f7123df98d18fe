"""A speculator server as a process, for tests; executors that attach to it; a wire that can be made long."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager, suppress
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


class LongWire:
    """A TCP proxy on the loopback that holds back what crosses for half of `seconds` in each direction."""

    def __init__(self, port: int, seconds: float) -> None:
        self._to = port
        self._delay = seconds / 2
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.port = 0

    def __enter__(self) -> LongWire:
        self._thread.start()
        assert self._ready.wait(30.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        listening = self._loop.run_until_complete(asyncio.start_server(self._connected, "127.0.0.1", 0))
        self.port = listening.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        listening.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to)
        try:
            await asyncio.gather(self._carry(reader, far_writer), self._carry(far_reader, writer))
        except asyncio.CancelledError:
            return  # the wire is taken away
        finally:
            for end in (writer, far_writer):
                with suppress(OSError):
                    end.close()

    async def _carry(self, source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        """Each piece leaves so long after it has come; the next one does not wait for that."""
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def leave() -> None:
            while True:
                at, piece = await pieces.get()
                await asyncio.sleep(max(0.0, at - self._loop.time()))
                if not piece:
                    to.close()
                    return
                to.write(piece)

        async def arrive() -> None:
            piece = b"?"
            while piece:
                try:
                    piece = await source.read(1 << 16)
                except OSError:
                    piece = b""
                pieces.put_nowait((self._loop.time() + self._delay, piece))

        await asyncio.gather(leave(), arrive())
