"""How an executor is served: address, key and limits, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from urllib.parse import urlsplit

from executor.config import check_seconds
from executor.errors import InvalidConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """`speclane serve`'s own options.

    host: address to bind; port: 0 is any that is free.
    api_key: what clients must send as `Authorization: Bearer …`; None lets in all who reach the port.
    model_name: how clients call the model; None is the target as it was named.
    max_body: bytes of a request's body. max_queue: sequences that may wait for a seat; more are told 429.
    request_timeout: seconds that an answer may take, waiting included; None is without limit.
    shutdown_timeout: seconds that answers under way get after SIGTERM.
    otlp_endpoint: where an OpenTelemetry collector takes spans, OTLP by HTTP; None sends none.
    cors_origins: origins whose pages may call this server from a browser.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    model_name: str | None = None
    max_body: int = 8 << 20
    max_queue: int = 256
    request_timeout: float | None = None
    shutdown_timeout: float = 30.0
    cors_origins: tuple[str, ...] = ()
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        """Raises InvalidConfig."""
        if not self.host:
            raise InvalidConfig("host", "host must not be empty; try 127.0.0.1")
        _within("port", self.port, 0, 65535, 8000)
        _within("max_body", self.max_body, 1024, 1 << 30, 8 << 20)
        _within("max_queue", self.max_queue, 0, 1 << 20, 256)
        if self.request_timeout is not None:
            check_seconds("request_timeout", self.request_timeout, works=300.0)
        check_seconds("shutdown_timeout", self.shutdown_timeout, works=30.0)
        if self.api_key is not None and (not self.api_key.strip() or not self.api_key.isascii()):
            raise InvalidConfig(
                "api_key", "api-key must be plain text that is not empty; try `openssl rand -hex 32`"
            )
        if self.otlp_endpoint is not None:
            object.__setattr__(self, "otlp_endpoint", _collector(self.otlp_endpoint))
        for origin in self.cors_origins:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise InvalidConfig(
                    "cors_origin", f"cors-origin {origin!r} is no origin; try http://localhost:3000"
                )


def _collector(url: str) -> str:
    """The endpoint with its path. Raises InvalidConfig, also if there is nothing to send spans with."""
    works = "http://localhost:4318"
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidConfig("otlp_endpoint", f"otlp-endpoint {url!r} is no URL of a collector; try {works}")
    try:
        found = find_spec("opentelemetry.exporter.otlp.proto.http")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise InvalidConfig(
            "otlp_endpoint",
            "otlp-endpoint needs OpenTelemetry, which is not installed; try pip install 'speclane[otel]'",
        )
    return url if parts.path.strip("/") else f"{url.rstrip('/')}/v1/traces"


def _within(name: str, value: int, low: int, high: int, works: int) -> None:
    if not low <= value <= high:
        raise InvalidConfig(
            name, f"{name.replace('_', '-')} must be from {low} to {high}, got {value}; try {works}"
        )
