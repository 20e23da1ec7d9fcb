"""The life of the server: start, readiness, drain and stop."""
