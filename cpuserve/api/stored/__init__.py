"""Stored responses and conversations of clients, and the rules for their files on disk."""
