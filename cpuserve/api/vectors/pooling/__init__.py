"""Vectors and class labels of texts and of single tokens, in the formats of vLLM."""
