"""Turns a GenerateCall into events, in the same way for every dialect, and without HTTP."""
