"""Convert events, values and errors to the bytes of responses."""
