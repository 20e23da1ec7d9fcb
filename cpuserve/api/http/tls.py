"""TLS: the certificate of the server, which is read again when its files change.

Kubernetes and certificate tools replace these files and send no signal, so the server compares
their inodes and times every few seconds. New connections get the new certificate; open ones go on.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpuserve.api.callers.key_file import state_of
from cpuserve.base.errors import ConfigError
from cpuserve.base.fault_points import fault
from cpuserve.base.log import get_logger

if TYPE_CHECKING:
    from cpuserve.config.server import ServerOptions

log = get_logger("serve")

LOOK_S = 2.0  # how often the server looks at the files
SOON_S = 7 * 24 * 3600.0  # how long before the end of the certificate a warning comes
_NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME, which the module ssl does not list
_REQUIREMENTS = {
    "none": ssl.CERT_NONE,
    "optional": ssl.CERT_OPTIONAL,
    "required": ssl.CERT_REQUIRED,
}
_TEXT = b"This port speaks TLS: use https://\n"
_PLAIN_RESPONSE = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(_TEXT), _TEXT)
)
_DROP_BYTES = 1 << 16


def certificate_of(options: ServerOptions) -> Certificate | None:
    """Return the certificate of a server; None if it speaks plain HTTP.

    Raises:
        ConfigError: a file cannot be used, or the options do not fit each other.
    """
    files = {
        "--ssl-certfile": options.ssl_certfile,
        "--ssl-keyfile": options.ssl_keyfile,
        "--ssl-ca-certs": options.ssl_ca_certs,
    }
    named = {flag: Path(file).expanduser() for flag, file in files.items() if file is not None}
    others = {
        "--ssl-keyfile-password": bool(options.ssl_keyfile_password),
        "--ssl-cert-reqs": options.ssl_cert_reqs != "none",
    }
    if "--ssl-certfile" not in named:
        for flag in (*named, *(flag for flag, given in others.items() if given)):
            msg = f"{flag} has no effect without a certificate: set --ssl-certfile"
            raise ConfigError(msg)
        return None
    if options.socket is not None:
        msg = "--ssl-certfile: a Unix socket needs no TLS. Leave out this option or --uds"
        raise ConfigError(msg)
    if ("--ssl-ca-certs" in named) != others["--ssl-cert-reqs"]:
        msg = "--ssl-ca-certs needs --ssl-cert-reqs optional or required, and these need it"
        raise ConfigError(msg)
    return Certificate(named, options.ssl_keyfile_password, _REQUIREMENTS[options.ssl_cert_reqs])


class NewestContext(ssl.SSLContext):
    """A context for servers: each new connection belongs to the context `newest`.

    A client that resumes a session shows no certificate again. So sessions must not outlive the
    authorities that have signed the certificates of clients.
    """

    newest: ssl.SSLContext

    def wrap_bio(self, *args: Any, **named: Any) -> ssl.SSLObject:
        """Return a new connection, as SSLContext.wrap_bio does; asyncio calls this."""
        return self.newest.wrap_bio(*args, **named)


class Certificate:
    """The certificate and key of the server, which `watch` reads again.

    context: the context of all servers; each new connection takes the newest certificate.
    valid: from when until when the certificate is valid, in seconds since 1970.
    """

    def __init__(
        self, files: Mapping[str, Path], password: str, requirement: ssl.VerifyMode
    ) -> None:
        """`files`: the file of each option. Raises ConfigError if they cannot be used.

        password: the password of the key; "" = the key needs none.
        requirement: whether clients need a certificate.
        """
        self._files = files
        self._password = password
        self._requirement = requirement
        self._loaded = self._seen = self._stamp()
        self._told = ""
        self._refused: object = None
        self.context = NewestContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.newest, self.valid = self._read()
        self._asked = asyncio.Event()
        self._warn()

    def ask(self) -> None:
        """Read the files now if they have changed."""
        self._asked.set()

    async def watch(self) -> None:
        """Look at the files every LOOK_S seconds, and when asked, until this is cancelled."""
        while True:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._asked.wait(), LOOK_S)
            settled = self._asked.is_set()
            self._asked.clear()
            await asyncio.to_thread(self.look, settled)

    def look(self, settled: bool = False) -> None:
        """Read the files if they have changed since the last reading but not since the last look.

        settled: whether they are complete, so that one look is enough.

        If they cannot be used, the server keeps the certificate that it has, and tries again at the
        next look: the reason may be the system's, such as too many open files.
        """
        stamp = self._stamp()
        settled, self._seen = settled or stamp == self._seen, stamp
        if settled and stamp != self._loaded:
            try:
                self.context.newest, self.valid = self._read()
            except ConfigError as error:
                refused = stamp, str(error)
                if refused != self._refused:
                    log.error("%s. The server keeps the certificate that it has", error)
                self._refused = refused
            else:
                self._loaded = stamp
                log.info("the certificate was replaced: new connections use the new one")
        self._warn()

    def _stamp(self) -> list[tuple[int, ...]]:
        """Return numbers that differ if a file was replaced or written; () = it is missing."""
        return [_facts(file) for file in self._files.values()]

    def _read(self) -> tuple[ssl.SSLContext, tuple[float, float]]:
        """Return a context with the pair, and from when until when the certificate is valid."""
        for flag, file in self._files.items():
            _check_readable(flag, file)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        certificate, key = self._files["--ssl-certfile"], self._files.get("--ssl-keyfile")
        where = f"--ssl-certfile {certificate}" + (f" and --ssl-keyfile {key}" if key else "")
        try:
            context.load_cert_chain(certificate, key, self._get_password)
            valid = _validity(context, certificate)
        except (OSError, ValueError) as error:
            msg = f"{where} cannot be used: {_reason(error)}"
            raise ConfigError(msg) from None
        if (authorities := self._files.get("--ssl-ca-certs")) is not None:
            try:
                context.load_verify_locations(authorities)
            except (OSError, ValueError) as error:
                msg = f"--ssl-ca-certs {authorities} cannot be used: {_reason(error)}"
                raise ConfigError(msg) from None
            context.verify_mode = self._requirement
        return context, valid

    def _get_password(self) -> str:
        # Without this function, OpenSSL would ask at the terminal.
        if not self._password:
            msg = "the key has a password: set CPUSERVE_SSL_KEYFILE_PASSWORD"
            raise ValueError(msg)
        return self._password

    def _warn(self) -> None:
        """Log once that clients refuse the certificate now, or soon will."""
        (begin, end), now, state = self.valid, time.time(), ""
        if now < begin:
            state = f"is not valid before {_date(begin)}"
        elif now > end:
            state = f"expired on {_date(end)}"
        elif now > end - SOON_S:
            state = f"expires on {_date(end)}"
        if state and state != self._told:
            file = self._files["--ssl-certfile"]
            log.warning("the certificate %s %s: replace the file", file, state)
        self._told = state


def _facts(file: Path) -> tuple[int, ...]:
    try:
        return state_of(file.stat())
    except OSError:
        return ()


def _check_readable(flag: str, file: Path) -> None:
    """Raise ConfigError if `file` is no file, such as a pipe that waits, or may not be read."""
    why = "there is no such file"
    try:
        fault("certificate.read")
        if file.is_file():
            with file.open("rb"):
                return
        elif file.exists():
            why = "it is not a file"
    except OSError as error:
        why = error.strerror or str(error)
    msg = f"{flag} {file} cannot be read: {why}"
    raise ConfigError(msg)


_REASONS = {
    "KEY_VALUES_MISMATCH": "the key does not belong to the certificate",
    "NO_START_LINE": "there is no certificate or key in PEM format in it",
    "BAD_DECRYPT": "the password of the key is wrong",
    "EE_KEY_TOO_SMALL": "the key of the certificate is too short for OpenSSL",
}


def _reason(error: Exception) -> str:
    """Return why OpenSSL refuses files; it gives no reason if PEM data is missing or damaged."""
    if not isinstance(error, ssl.SSLError):
        return str(error)
    reason = error.reason or ""
    if reason in _REASONS:
        return _REASONS[reason]
    if "PEM lib" in str(error):
        return "the certificate or its key is missing, is not PEM, or has another password"
    return reason.replace("_", " ").lower() or str(error)


def _validity(context: ssl.SSLContext, certificate: Path) -> tuple[float, float]:
    """Return from when until when a certificate is valid, in seconds since 1970.

    Only a client that trusts a certificate can read it with the module ssl. So a client in this
    process trusts the file and makes a handshake with `context`, in memory.

    Raises:
        ssl.SSLError: no client can use the certificate.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | ssl.VerifyFlags(_NO_CHECK_TIME)
    client.load_verify_locations(certificate)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server)
    answering = context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):  # each side needs the messages of the other side twice
        for side in (asking, answering):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    found: Mapping[str, Any] = asking.getpeercert() or {}
    begin, end = (ssl.cert_time_to_seconds(str(found[name])) for name in ("notBefore", "notAfter"))
    return float(begin), float(end)


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


class TlsConnection(socket.socket):
    """A connection of a client that should speak TLS: plain HTTP gets a response in plain text.

    asyncio would close such a connection without a response. So the first byte is checked before
    asyncio reads it. After the response, further bytes are dropped until the client disconnects:
    closing a connection with unread data would reset it, and the client could lose the response.
    """

    refused: Callable[[], None] | None = None
    _looked = False
    _dropping = False

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        """Return received bytes, as socket.recv does, or b"" at the end."""
        self._look()
        if not self._dropping:
            return super().recv(size, flags)
        if super().recv(_DROP_BYTES):
            raise BlockingIOError
        return b""

    def recv_into(self, buffer: Any, size: int = 0, flags: int = 0, /) -> int:
        """Fill a buffer with received bytes, as socket.recv_into does; 0 = the end."""
        self._look()
        if not self._dropping:
            return super().recv_into(buffer, size, flags)
        return len(self.recv(_DROP_BYTES))

    def _look(self) -> None:
        if self._looked:
            return
        first = super().recv(1, socket.MSG_PEEK)  # BlockingIOError if nothing has come
        self._looked = True
        if first.isalpha():  # the method of a request; TLS begins with a byte that is no letter
            self._dropping = True
            with suppress(OSError):  # the client has disconnected
                self.send(_PLAIN_RESPONSE)
                self.shutdown(socket.SHUT_WR)
            if self.refused is not None:
                self.refused()
