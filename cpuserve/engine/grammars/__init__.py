"""Grammars: a process compiles them and fills the masks of tokens that may follow."""
