"""Templates in the syntax of Go, which Ollama renders: recognize them."""

from __future__ import annotations

import re

# An action of a Go template: a field (.Prompt), a variable ($), or a keyword. Jinja has no such
# expressions, and writes statements as {% if %}.
_ACTION = re.compile(r"\{\{-?\s*(?:\.|\$|(?:if|else|end|range|with|define|template|block)\b)")


def is_go_template(source: str) -> bool:
    """Return whether a template is written in the syntax of Go."""
    return _ACTION.search(source) is not None


def go_template_error() -> str:
    """Return why such a template is refused, and what to do."""
    return (
        "template is in the syntax of Go, which this server cannot render: send the Jinja template "
        "of the model (chat_template in tokenizer_config.json), or omit template to keep the one "
        "of its files"
    )
