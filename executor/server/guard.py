"""Who may ask, and how much: key, origin, size of the body. Knows nothing of what is asked."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from typing import TYPE_CHECKING

from executor.server.errors import ApiError

if TYPE_CHECKING:
    from starlette.requests import Request

BODY_SECONDS = 30.0
"""For a client to send its whole body."""
_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")


class Guard:
    def __init__(self, api_key: str | None, max_body: int) -> None:
        """`max_body` in bytes."""
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()
        self._max_body = max_body

    def check_key(self, request: Request) -> None:
        """Raises ApiError, 401."""
        if self._expected is None:
            return
        given = request.headers.get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(given, self._expected):
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def check_operator(self, request: Request) -> None:
        """For what changes the server itself: the key, or without one a client of this machine.

        The name in `Host` counts too, or else a page in a browser could reach us under a name of its own.
        Raises ApiError, 401 or 403.
        """
        self.check_key(request)
        if self._expected is not None:
            return
        near = request.client is not None and _is_loopback(request.client.host)
        named = _is_loopback(request.url.hostname or "")
        if not (near and named) or any(name in request.headers for name in _FORWARDED):
            raise ApiError(
                403,
                "this is for clients of the same machine; start the server with --api-key for others",
                code="loopback_only",
            )

    async def body(self, request: Request) -> bytes:
        """All of it. Raises ApiError: 408, 413, 415."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a browser may not send this type elsewhere without being asked
            raise ApiError(415, f"the body must be application/json, not {kind or 'untyped'}")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_body:
            raise self._too_large()
        data = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    data += part
                    if len(data) > self._max_body:
                        raise self._too_large()
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {BODY_SECONDS:g} s") from None
        return bytes(data)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body may have {self._max_body} bytes; send less", code="body_too_large")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
