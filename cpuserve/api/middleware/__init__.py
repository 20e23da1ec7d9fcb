"""ASGI middleware: what happens to every request around its route."""
