"""The models that clients create and pull: their descriptions and files on the server's disk."""
