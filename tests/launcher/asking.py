"""What a client asks of a launched server."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

from launching import SECONDS

PROMPT = "once upon a time"
TOKENS = 48
SAMPLING = {"temperature": 0.8, "seed": 7, "max_tokens": TOKENS}


def post(url: str, body: dict[str, Any], seconds: float = SECONDS) -> dict[str, Any]:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=seconds)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        assert reply.status == 200, reply.read()
        return json.load(reply)
    finally:
        connection.close()


def text(url: str, seconds: float = SECONDS, **body: Any) -> str:
    """One completion, which hangs on nothing but the target's model."""
    answer = post(url, {"prompt": PROMPT} | SAMPLING | body, seconds)
    return str(answer["choices"][0]["text"])
