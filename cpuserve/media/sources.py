"""Where the bytes of pictures come from besides the request: files, and servers of others.

A client chooses the file or the URL, so both are refused unless the server allows the folder or
the host. A host is resolved once; the connection uses the address that was checked.
"""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import stat
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from pathlib import Path
from socket import create_connection, getaddrinfo
from typing import NoReturn
from urllib.parse import SplitResult, quote, unquote, urlsplit

from cpuserve.base.errors import LIMITS, InvalidRequest, ServiceUnavailable, is_of_the_system
from cpuserve.base.fault_points import fault

_PORTS = {"http": 80, "https": 443}
_PART_BYTES = 1 << 16
# Follow no link, and do not wait for the writer of a pipe. Windows has neither of the flags.
_OPEN_FLAGS: int = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_NAT64 = ip_network("64:ff9b::/96")  # addresses of IPv4 hosts for clients with IPv6 only
_GLOBAL = ip_network("2000::/3")  # all addresses of IPv6 that are given to hosts in the internet
_ISATAP = (0x5EFE, 0x02005EFE)  # before the IPv4 address of a host in a tunnel
_KEPT = "%/:?@!$&'()*+,;=~-._[]"  # characters of a URL that are sent as they are
_MOST_URL_CHARS = 8192
DATA = "send its bytes as a data: URL"

Address = IPv4Address | IPv6Address


@dataclass(frozen=True, slots=True)
class SourceRules:
    """Which sources a client may name.

    domains: host names; "*.example.com" is any host below example.com, and "*" any host.
    folder: files below it may be named as file: URLs; None = no files.
    most_bytes: the most bytes of one file.
    timeout_s: how many seconds another server may take.
    """

    domains: tuple[str, ...] = ()
    folder: str | None = None
    most_bytes: int = 32 << 20
    timeout_s: float = 1.5

    def allows(self, host: str) -> bool:
        """Return whether the server may fetch pictures from this host."""
        return any(
            domain == "*"
            or host == domain
            or (domain.startswith("*.") and host.endswith(domain[1:]))
            for domain in map(str.lower, self.domains)
        )


def read_source(url: str, rules: SourceRules) -> bytes:
    """Return the bytes at a file:, http: or https: URL; the call waits for them.

    Raises, with a message without a subject:
      InvalidRequest: the rules or the other side refuse.
      ServiceUnavailable: this system refuses, for example because it has too many open files.
    """
    if len(url) > _MOST_URL_CHARS:
        _refuse(f"has a URL of {len(url)} characters: at most {_MOST_URL_CHARS} are accepted")
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:
        _refuse("has an invalid URL")
    scheme = parts.scheme.lower()
    if scheme == "file":
        return _file(parts, rules)
    if scheme in _PORTS and not host:
        _refuse(f"has a URL without a host: {DATA}")
    if scheme not in _PORTS:
        _refuse(f"has a URL of the scheme {scheme[:20]!r}, which is never fetched: {DATA}")
    if not rules.allows(host):
        _refuse(
            f"is at {host[:100]!r}, and this server fetches nothing from there: {DATA}, or start "
            "the server with --allowed-media-domains"
        )
    if parts.username is not None or parts.password is not None:
        _refuse("has a URL with a user name, which is never sent")
    return _fetched(parts, host, port or _PORTS[scheme], rules)


def _file(parts: SplitResult, rules: SourceRules) -> bytes:
    if rules.folder is None:
        _refuse(
            f"is a file on the server, and this server reads none: {DATA}, or start the server "
            "with --allowed-local-media-path"
        )
    outside = "is not below the folder of --allowed-local-media-path, or cannot be read"
    if parts.netloc not in ("", "localhost"):
        _refuse(outside)
    try:
        folder = Path(rules.folder).expanduser().resolve(strict=True)
        path = Path(unquote(parts.path)).resolve(strict=True)
        if not path.is_relative_to(folder):
            _refuse(outside)
        fault("media_file.open")
        descriptor = os.open(path, os.O_RDONLY | _OPEN_FLAGS)
    except (OSError, ValueError) as error:
        _check_system(error)
        _refuse(outside)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            _refuse(outside)
        if status.st_size > rules.most_bytes:
            _refuse(f"has {status.st_size} bytes: at most {rules.most_bytes} are accepted")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(rules.most_bytes)
    except OSError as error:
        _check_system(error)
        _refuse(outside)
    finally:
        os.close(descriptor)


def _fetched(parts: SplitResult, host: str, port: int, rules: SourceRules) -> bytes:
    """Return the body of the response to GET. No redirect is followed, and no proxy is used."""
    deadline = time.monotonic() + rules.timeout_s
    address = _checked(host, _addresses(host, port))
    connection = http.client.HTTPConnection(host, port)
    try:
        fault("media.connect")
        seconds_left = max(0.01, deadline - time.monotonic())
        sockets = [create_connection((str(address), port), timeout=seconds_left)]
        # A server that sends a byte now and then would never reach the timeout of a socket.
        timer = threading.Timer(seconds_left, lambda: _shut(sockets[0]))
        timer.daemon = True
        timer.start()
        try:
            if parts.scheme.lower() == "https":
                secure = _tls().wrap_socket(
                    sockets[0], server_hostname=host, do_handshake_on_connect=False
                )
                sockets[0] = secure
                secure.do_handshake()
            connection.sock = sockets[0]
            body = _body(connection, parts, rules)
            if time.monotonic() >= deadline:  # a body without a length looks whole when it is cut
                raise TimeoutError
            return body
        finally:
            timer.cancel()
            sockets[0].close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        _check_system(error)
        if time.monotonic() >= deadline:
            _refuse(
                f"was not sent by {host[:100]} within {rules.timeout_s:g} s: {DATA}, or start the "
                "server with a longer --image-fetch-timeout"
            )
        said = " ".join(str(error).split())[:200] or type(error).__name__
        _refuse(f"cannot be fetched from {host[:100]} ({said}): {DATA}")


def _body(connection: http.client.HTTPConnection, parts: SplitResult, rules: SourceRules) -> bytes:
    target = quote(parts.path or "/", _KEPT) + (
        f"?{quote(parts.query, _KEPT)}" if parts.query else ""
    )
    headers = {"Accept": "image/*, application/pdf", "User-Agent": "cpuserve"}
    connection.request("GET", target, headers={**headers, "Connection": "close"})
    with connection.getresponse() as response:
        if 300 <= response.status < 400:
            _refuse("is at a URL that redirects to another one: redirects are not followed")
        if response.status != 200:
            _refuse(f"cannot be fetched: the other server sent the status {response.status}")
        body = bytearray()
        while part := response.read(_PART_BYTES):
            body += part
            if len(body) > rules.most_bytes:
                _refuse(f"has more than {rules.most_bytes} bytes: send a smaller one")
        return bytes(body)


def _addresses(host: str, port: int) -> list[Address]:
    """Return the addresses of a host, in the order of the resolver."""
    try:
        entries = getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        _refuse(f"is at {host[:100]}, and this name has no address")
    return [ip_address(str(entry[4][0]).partition("%")[0]) for entry in entries]


def _checked(host: str, addresses: Sequence[Address]) -> Address:
    """Return the first address, if all of them are public."""
    if not addresses or not all(map(is_public, addresses)):
        _refuse(f"is at {host[:100]}, which is no public address: {DATA}")
    return addresses[0]


def is_public(address: Address) -> bool:
    """Return whether anybody in the internet can reach an address, and it is one host."""
    if isinstance(address, IPv6Address):
        inner_addresses: list[IPv4Address | None] = [address.ipv4_mapped, address.sixtofour]
        inner_addresses += address.teredo or ()
        if address in _NAT64 or int(address) >> 32 & 0xFFFFFFFF in _ISATAP:
            inner_addresses.append(IPv4Address(int(address) & 0xFFFFFFFF))
        if not all(
            is_public(inner_address)
            for inner_address in inner_addresses
            if inner_address is not None
        ):
            return False
        if address.ipv4_mapped is not None or address in _NAT64:
            return True
        if address not in _GLOBAL:
            return False
    return address.is_global and not address.is_multicast


def _shut(sock: socket.socket) -> None:
    with suppress(OSError):  # it is closed already
        sock.shutdown(socket.SHUT_RDWR)


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _check_system(error: Exception) -> None:
    """Raise ServiceUnavailable if this system is the reason of an error."""
    if isinstance(error, OSError) and is_of_the_system(error):
        msg = f"cannot be read now, because the system refuses: {error.strerror} ({LIMITS})"
        raise ServiceUnavailable(msg) from None


def _refuse(reason: str) -> NoReturn:
    raise InvalidRequest(reason)
