"""Prometheus metrics: figures, observations, and the response of GET /metrics."""
