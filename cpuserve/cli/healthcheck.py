"""`python3 -m cpuserve.cli.healthcheck`: the HEALTHCHECK of the container image.

The command finds the address of the server in the flags of process 1, in the environment
(which is equal to the server's) and in the config file.
With `--port 0`, the address comes from the sockets on which process 1 and its children listen.
The exit code is 0 if /health returns 200, otherwise 1.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import sys
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from cpuserve.base.errors import StartupError
from cpuserve.cli.flags import asked, normalize
from cpuserve.cli.main import build_parser
from cpuserve.cli.terminal import say

if TYPE_CHECKING:
    from cpuserve.config.server import ServerOptions

TIMEOUT_S = 4.0
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def main(command: Sequence[str] | None = None, pid: int = 1) -> int:
    """Check the server in process `pid` or in its children; print why it is not healthy.

    command: the command line of the process; None = read it from the process.
    """
    try:
        flags = _flags(_command_line(pid) if command is None else command)
        with closing(_connection(flags, pid)) as connection:
            connection.request("GET", "/health")
            response = connection.getresponse()
            body = response.read()
    except (StartupError, OSError, http.client.HTTPException) as error:
        say(f"no answer: {error}")
        return 1
    if response.status == 200:
        return 0
    say(body.decode(errors="replace"))
    return 1


def _command_line(pid: int) -> list[str]:
    text = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")
    return text.rstrip("\0").split("\0")


def _flags(command: Sequence[str]) -> list[str]:
    """Return the arguments after `cpuserve serve`; an init program may come before them."""
    for i, (program, name) in enumerate(pairwise(command)):
        if Path(program).name == "cpuserve" and name == "serve":
            return list(command[i + 2 :])
    return []


def _connection(serve_flags: Sequence[str], pid: int) -> http.client.HTTPConnection:
    """Return a connection to the address of a server with these flags."""
    args, _ = build_parser().parse_known_args(normalize(["serve", *serve_flags]))
    server = asked(args).server
    if server.socket is not None:
        connection = http.client.HTTPConnection("localhost", timeout=TIMEOUT_S)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(TIMEOUT_S)
        connection.sock.connect(server.socket)
        return connection
    host, port = server.host, server.port
    if port == 0:
        host, port = _listening(pid)
    host = _LOOPBACK.get(host, host)
    if server.ssl_certfile is not None:
        return http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=_tls(server))
    return http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)


def _tls(server: ServerOptions) -> ssl.SSLContext:
    """Return a context that takes any certificate: it is on this machine, under another name.

    If the server asks clients for a certificate, this client sends the certificate of the server.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if server.ssl_certfile is not None and server.ssl_cert_reqs != "none":
        context.load_cert_chain(
            server.ssl_certfile, server.ssl_keyfile, server.ssl_keyfile_password
        )
    return context


def _listening(pid: int) -> tuple[str, int]:
    """Return the address on which a process or one of its children listens.

    Raises:
        StartupError: none of the processes listens, or their sockets cannot be read.
    """
    import psutil

    try:
        first = psutil.Process(pid)
        for process in (first, *first.children(recursive=True)):
            for socket_ in process.net_connections("tcp"):
                if socket_.status == psutil.CONN_LISTEN:
                    return socket_.laddr.ip, socket_.laddr.port
    except psutil.Error as error:
        msg = f"the sockets of process {pid} cannot be read: {error}"
        raise StartupError(msg) from None
    msg = f"neither process {pid} nor a child of it listens on a port yet"
    raise StartupError(msg)


if __name__ == "__main__":
    sys.exit(main())
