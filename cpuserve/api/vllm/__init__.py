"""Routes of the vLLM server that no other dialect has: administration, adapters, token ids."""
