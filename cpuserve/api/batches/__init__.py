"""Uploaded files and batches of requests, which the server stores on disk."""
