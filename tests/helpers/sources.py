"""Source files, parsed once for all rules about them."""

import ast
import functools


@functools.cache
def parsed(source: str) -> ast.Module:
    """Return the tree of Python source text; raises SyntaxError."""
    return ast.parse(source)


@functools.cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """Return all nodes of the tree of Python source text, the module first."""
    return tuple(ast.walk(parsed(source)))
