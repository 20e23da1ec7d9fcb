"""Loads model files: config dicts and memory-mapped tensors."""
