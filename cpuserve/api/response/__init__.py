"""From events, values and errors to the bytes of a response."""
