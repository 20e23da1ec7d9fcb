"""Module names of vLLM, for command lines that run them."""
