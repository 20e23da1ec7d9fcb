"""The HTTP layer below the application: the listening socket and the HTTP/1.1 protocol."""
