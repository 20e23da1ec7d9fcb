"""Free ports for servers that tests start."""

import socket
import sys


def reserve_port():
    """Return a free port of 127.0.0.1, and a socket that keeps it for a server until it is closed.

    Otherwise a test that runs at the same time could get the port before the server listens there.
    Linux lets another socket listen on a port that is only bound; elsewhere nothing keeps the port.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]
    if sys.platform != "linux":
        held.close()
    return port, held
