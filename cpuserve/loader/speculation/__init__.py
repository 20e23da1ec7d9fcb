"""Heads and assistants, which guess tokens for a model."""
