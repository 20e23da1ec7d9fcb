"""The settings of the HTTP front end."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """Settings of the HTTP front end. uds: a socket path, used instead of host and port.

    drain_delay_s: how long after the first signal the port stays open and requests are accepted,
    while /health already returns 503. drain_s: how long running requests may continue after that;
    the remaining ones then end with an error, which takes a few seconds at most. silent_s: the time
    without an event after which a stream sends a comment. max_queued_*: limits on requests, and on
    prompt tokens, that wait for a first token. longest_s: the maximum time of a request; None = no
    limit. engine_restart: whether an engine that died is restarted. max_body_bytes: None = a size
    derived from the model's context length. allowed_hosts: see host_names. allowed_origins and the
    fields after it: CORS.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    api_keys: Sequence[str] = ()
    access_log: bool = False
    drain_delay_s: float = 0.0
    drain_s: float = 30.0
    header_timeout_s: float = 15.0
    write_timeout_s: float = 30.0
    silent_s: float = 15.0
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1 << 20
    longest_s: float | None = None
    engine_restart: bool = True
    max_body_bytes: int | None = None
    public_metrics: bool = False
    allowed_hosts: Sequence[str] = ()
    allowed_origins: Sequence[str] = ()
    allowed_methods: Sequence[str] = ("*",)
    allowed_headers: Sequence[str] = ("*",)
    allow_credentials: bool = False

    @property
    def host_names(self) -> Sequence[str] | None:
        """Host names, besides local ones, that requests may be addressed to; None = any.

        Without an API key, a loopback address does not protect from web pages in a browser on this
        machine: a page can make its own host name resolve to 127.0.0.1 (DNS rebinding).
        """
        if "*" in self.allowed_hosts:
            return None
        if self.allowed_hosts:
            return self.allowed_hosts
        return () if is_loopback(self.host) and not (self.uds or self.api_keys) else None


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
