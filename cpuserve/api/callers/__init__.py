"""The callers of a server: their API keys, and the file that lists them."""
