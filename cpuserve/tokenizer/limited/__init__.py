"""Processes with limits on time and memory, for tokenizers that are not plain."""
