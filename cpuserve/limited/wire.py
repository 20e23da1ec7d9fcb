"""Messages between a server and its limited processes: a length of 8 bytes, then one body."""

from __future__ import annotations

import socket

LENGTH_BYTES = 8
RECEIVE_BYTES = 1 << 20


def send(sock: socket.socket, *parts: bytes) -> None:
    """Send one body, given in parts. Raises OSError if the other side has gone."""
    sock.sendall(sum(map(len, parts)).to_bytes(LENGTH_BYTES, "little"))
    for part in parts:
        sock.sendall(part)


def receive(sock: socket.socket) -> bytes | None:
    """Return the next body, or None if the other side has closed the connection."""
    length = _exactly(sock, LENGTH_BYTES)
    return None if length is None else _exactly(sock, int.from_bytes(length, "little"))


def _exactly(sock: socket.socket, size: int) -> bytes | None:
    parts = []
    while size > 0:
        part = sock.recv(min(size, RECEIVE_BYTES))
        if not part:
            return None
        size -= len(part)
        parts.append(part)
    return b"".join(parts)
