"""Marks in Lark grammars that only the process for grammars reads, before llguidance does."""

from __future__ import annotations

# White space between the parts of JSON: none, a space, or a line break and its indentation.
# A model that may write any white space may write nothing else until max_tokens.
WHITE_SPACE = r" |\n{1,2}[ \t]{0,20}"

# A line of a Lark grammar that ends with PARAMETERS_OF and the name of a function
# contains the schema of the function. The name is for messages about errors in the schema.
OF_FUNCTION = "the parameters of "
PARAMETERS_OF = f" // {OF_FUNCTION}"

# If the function is not strict, this comment comes before PARAMETERS_OF.
# If llguidance cannot enforce the schema in this line, it enforces only the type of the schema.
IF_POSSIBLE = " // if possible"

# If a rule of a Lark grammar ends with this comment and a text, all special tokens except the one
# with this text match the rule as well. Only the process for grammars knows the special tokens.
OTHER_TOKENS = " // and special tokens other than "

# If the first line of a Lark grammar of tool calls is this comment and a text in JSON,
# a structured output in place of the calls begins with this text (the header of a message).
FORM_BEGINS = "// a structured output begins with "

# A client may send a grammar for the text that a custom tool takes.
# Only the process for grammars reads this grammar. The grammar is sent in one of two ways:
# - If calls are JSON, the tool is a function with one parameter INPUT. The schema of INPUT
#   has the grammar in its member INPUT_GRAMMAR: {"syntax": "lark" or "regex", "definition": ...}.
# - If calls have tags in place of JSON, the Lark grammar of calls has a rule
#   `NAME: %text {"syntax", "definition", "end"}`, which matches the text and then `end`.
# In both cases the line of the Lark grammar ends with PARAMETERS_OF and the name of the tool.
INPUT, INPUT_GRAMMAR, RAW_TEXT = "input", "x-input-grammar", "%text"
OF_GRAMMAR = "the grammar of "
