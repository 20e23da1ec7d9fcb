"""Batches of messages, in the format of Anthropic."""
