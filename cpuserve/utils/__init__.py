"""Helpers of programs for the offline API, in the modules of vLLM."""
