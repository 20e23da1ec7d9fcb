"""Names of vLLM's modules, for command lines that run them."""
