"""The data of `LLM.encode` as Python lists, which tests compare."""


def listed(data):
    """Return an array as lists of numbers, or a dict of arrays as a dict of such lists."""
    if isinstance(data, dict):
        return {name: rows.tolist() for name, rows in data.items()}
    return data.tolist()
