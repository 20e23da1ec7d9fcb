"""ASGI middleware: processing of every request before and after its route."""
