"""The listening socket, which continues to accept connections after descriptors have run out."""

from __future__ import annotations

import errno
import ipaddress
import os
import resource
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpuserve.api.http.access_log import log_refused
from cpuserve.api.http.tls import TlsConnection, certificate_of
from cpuserve.base.errors import ConfigError, InvalidRequest
from cpuserve.base.fault_points import fault
from cpuserve.base.log import get_logger

if TYPE_CHECKING:
    from cpuserve.api.http.tls import Certificate
    from cpuserve.config.server import ServerOptions

# Each stream needs a file descriptor, and the usual soft limit of 1024 is for users of select().
MOST_FILES = 1 << 16
_EXHAUSTED = (errno.EMFILE, errno.ENFILE)
_QUIET_S = 60.0
_BACKLOG = 2048
_NO_TLS = InvalidRequest("This port speaks TLS", code="plain_http_on_tls_port")

log = get_logger("serve")


class Listener(socket.socket):
    """A socket that closes new connections if file descriptors run out; it logs once a minute.

    Otherwise asyncio would retry 2048 times in each iteration of its event loop and log a traceback
    each time: 140 MB of log in ten seconds, and no other event would be handled.

    certificate: the certificate for TLS; None = connections are plain.
    """

    certificate: Certificate | None = None

    def __init__(self, family: int, kind: int, protocol: int = 0) -> None:
        super().__init__(family, kind, protocol)
        self._spare = os.open(os.devnull, os.O_RDONLY)
        self._told = -_QUIET_S
        self._path: Path | None = None
        self._file: tuple[int, ...] = ()

    def owns(self, path: Path) -> None:
        """Note that the socket file `path` belongs to this listener, so that `close` removes it."""
        self._path, self._file = path, _identity(path)

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection; BlockingIOError if there is none or it had to be closed."""
        try:
            fault("client.accept")
            connection, address = super().accept()
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
            self._refuse(error)
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from error
        if self.certificate is None:
            return connection, address
        secure = TlsConnection(fileno=connection.detach())
        secure.refused = lambda: log_refused(address, _NO_TLS, b"")
        return secure, address

    def _refuse(self, error: OSError) -> None:
        self._give_back()
        with suppress(OSError):
            super().accept()[0].close()
        with suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY)
        now = time.monotonic()
        if now - self._told >= _QUIET_S:
            self._told = now
            log.warning(
                "new connections are closed: %s; raise the limit with ulimit -n", error.strerror
            )

    def _give_back(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    def close(self) -> None:
        """Stop listening, and remove the socket file.

        The file is removed while the socket still listens: until then, no other server
        can take the path. Afterwards, the file at the path may belong to another server.
        """
        self._give_back()
        path, self._path = self._path, None
        if path is not None:
            with suppress(OSError):
                if _identity(path) == self._file:
                    path.unlink()
        super().close()


def _identity(path: Path) -> tuple[int, ...]:
    """Return (device, inode, mtime in ns) of a file; mtime detects a reused inode."""
    facts = path.lstat()
    return facts.st_dev, facts.st_ino, facts.st_mtime_ns


@contextmanager
def open_listener(options: ServerOptions) -> Iterator[Listener]:
    """Return the listening socket; ConfigError if the address or certificate cannot be used."""
    certificate = certificate_of(options)
    listener = (
        _bind_unix(Path(options.socket).expanduser())
        if options.socket
        else _bind_tcp(options.host, options.port)
    )
    listener.certificate = certificate
    try:
        # Listen now: two sockets can be bound to one address as long as neither of them listens.
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        yield listener
    finally:
        listener.close()


def _bind_tcp(host: str, port: int) -> Listener:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        msg = f"cannot listen on {host}: {error}. Set --host to an address of this machine"
        raise ConfigError(msg) from None
    listener = Listener(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1)
    except OSError as error:
        listener.close()
        msg = (
            f"cannot listen on {host} port {port}: {os.strerror(error.errno or 0)}. "
            "Choose another port with --port, or a free one with --port 0"
        )
        raise ConfigError(msg) from None
    return listener


def _bind_unix(path: Path) -> Listener:
    listener = Listener(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        listener.bind(str(path))
        listener.owns(path)
    except OSError as error:
        listener.close()
        msg = f"cannot listen on the socket {path}: {error.strerror or error}"
        raise ConfigError(msg) from None
    return listener


def _remove_stale(path: Path) -> None:
    """Remove the socket file of a killed server; leave sockets in use and other files alone."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()


def url_of(listener: Listener) -> str:
    """Return the URL at which clients on this machine reach the listener."""
    address = listener.getsockname()
    if isinstance(address, str):
        return f"unix:{address}"
    host = str(address[0])
    scheme = "http" if listener.certificate is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{address[1]}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def raise_file_limit() -> None:
    """Raise the soft limit on file descriptors to the hard limit, but at most to MOST_FILES."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # a sandbox may forbid the change
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
