"""The other end of `speclane bench http`: reads streams and notes when each event arrived.

It only reads while it measures, so that its own time is not taken for the server's.
python -m executor.bench.http_client URL PROMPT STREAMS TOKENS
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import time
from urllib.parse import urlsplit

_MARK = b'"finish_reason":null'
"""In each event that holds text, once."""


def _ask(connection: socket.socket, body: dict[str, object]) -> None:
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)


def _arrivals(received: list[tuple[int, bytes]]) -> list[int]:
    """When each event with text was there as a whole, in nanoseconds of the monotonic clock."""
    so_far, arrivals = b"", []
    for at, data in received:
        so_far += data
        arrivals += [at] * so_far.count(_MARK)
        so_far = so_far[so_far.rfind(_MARK) + len(_MARK) :] if _MARK in so_far else so_far
    return arrivals


def _main(url: str, prompt: str, streams: int, tokens: int) -> None:
    address = urlsplit(url)
    connections = [socket.create_connection((address.hostname, address.port)) for _ in range(streams)]
    received: list[list[tuple[int, bytes]]] = [[] for _ in connections]
    selector = selectors.DefaultSelector()
    for connection, parts in zip(connections, received, strict=True):
        selector.register(connection, selectors.EVENT_READ, parts)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    for seed, connection in enumerate(connections):
        asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "seed": seed}
        _ask(connection, asked)
    while selector.get_map():
        for key, _ in selector.select():
            data = os.read(key.fd, 1 << 16)
            key.data.append((time.monotonic_ns(), data))
            if not data:
                selector.unregister(key.fileobj)
    sys.stdout.write(json.dumps({seed: _arrivals(parts) for seed, parts in enumerate(received)}))


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
