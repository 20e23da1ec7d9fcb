"""Endpoints about the server: health, metrics, machine, routes."""
