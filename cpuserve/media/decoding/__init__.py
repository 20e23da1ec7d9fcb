"""Decoding of pictures and documents in a process with limits on memory and time."""
