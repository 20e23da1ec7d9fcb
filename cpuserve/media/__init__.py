"""Pictures of requests: where they come from, decoding them, and how a model reads them."""
