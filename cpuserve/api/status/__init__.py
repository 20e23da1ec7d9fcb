"""Routes about the server itself: health, metrics, CPU use, and a list of all routes."""
