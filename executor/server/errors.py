"""What a client is told when its request is not served: a status and OpenAI's error object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
from starlette.responses import Response

from executor.errors import Closed, InvalidConfig, InvalidRequest, LaneFailed, SpeclaneError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.exceptions import HTTPException
    from starlette.requests import Request

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """`param`: the field that is to blame. `code`: a word that a program can compare."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def kind(self) -> str:
        return _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    @property
    def body(self) -> dict[str, Any]:
        message = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": message}

    def response(self) -> Response:
        return Response(
            msgspec.json.encode(self.body), self.status, self.headers, media_type="application/json"
        )


def refuse(param: str, message: str, *, code: str = "invalid_value") -> NoReturn:
    """A field that cannot be served as it is. Raises ApiError, 400."""
    raise ApiError(400, message, param=param, code=code)


def api_error(error: SpeclaneError) -> ApiError:
    """What an error of the executor is over HTTP."""
    match error:
        case InvalidRequest() | InvalidConfig():
            return ApiError(400, str(error), param=error.field, code="invalid_value")
        case Closed():
            return ApiError(503, str(error), code="closed")
        case LaneFailed():
            return ApiError(503, str(error), code="lane_failed")
        case _:
            return ApiError(500, str(error), code="request_failed")


async def on_api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def on_executor_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, SpeclaneError)
    return api_error(error).response()


async def on_http_error(request: Request, error: Exception) -> Response:
    """No such path, or no such method."""
    status, detail = _http(error)
    return ApiError(status, f"{request.method} {request.url.path}: {detail}").response()


async def on_defect(_request: Request, _error: Exception) -> Response:
    """Our own mistake; uvicorn logs its traceback."""
    return ApiError(500, "internal error; the server's log says more", code="internal").response()


def _http(error: Exception) -> tuple[int, str]:
    http: HTTPException = error  # type: ignore[assignment]
    return http.status_code, http.detail
