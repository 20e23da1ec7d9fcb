"""Models that clients create or pull: their manifests and files on the server's disk."""
