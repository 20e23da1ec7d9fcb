"""A request in the words of no dialect (GenerateCall), and the parts of its response (events)."""
