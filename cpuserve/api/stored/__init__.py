"""Responses and conversations that clients store in the memory of this server."""
