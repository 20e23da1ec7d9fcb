"""Which KV block belongs to whom."""
