"""Vectors and labels of texts and of their tokens, in the formats of vLLM."""
