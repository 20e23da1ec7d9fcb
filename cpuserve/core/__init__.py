"""Requests, the queue, the scheduler and paged KV bookkeeping: pure Python, no kernels."""
