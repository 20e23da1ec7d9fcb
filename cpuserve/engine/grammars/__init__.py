"""Grammars: a process compiles them and fills the bitmasks of tokens that may follow."""
