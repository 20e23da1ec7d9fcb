"""Read, limit, decode and check the bodies of requests."""
