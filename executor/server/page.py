"""The dashboard: one static page, and the stream that keeps it alive."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.routing import Route

if TYPE_CHECKING:
    from starlette.requests import Request

    from executor.server.guard import Guard
    from executor.server.live import Live, LiveStream

_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


class Page:
    def __init__(self, live: Live, guard: Guard) -> None:
        self._live = live
        self._guard = guard
        self._html = files("executor.server").joinpath("page.html").read_bytes()

    def routes(self) -> list[Route]:
        return [Route("/", self.page), Route("/live", self.live)]

    async def page(self, _request: Request) -> Response:
        """Holds nothing of the executor, so that no key is needed: what it shows comes by `/live`."""
        return Response(self._html, media_type="text/html", headers=_HEADERS)

    async def live(self, request: Request) -> LiveStream:
        self._guard.check_key(request)
        return self._live.stream()
