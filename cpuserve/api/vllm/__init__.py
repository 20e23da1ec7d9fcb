"""Routes that only the vLLM server has: administration and load."""
