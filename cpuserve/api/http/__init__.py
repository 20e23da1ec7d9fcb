"""The HTTP server: the listening socket, the HTTP/1.1 protocol, and the middleware."""
