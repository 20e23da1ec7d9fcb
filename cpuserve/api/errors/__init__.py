"""Errors as HTTP responses, and the log of requests that fail."""
