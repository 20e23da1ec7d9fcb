"""Model files to config dicts and mapped tensors."""
