"""Turns a GenerateCall into events, in the same way for every dialect, and without HTTP.

Its folders import only those below them: generation, prompts and vectors, models, tools, calls,
decisions. A request goes through them from `generation.generate.prepare`.
"""
