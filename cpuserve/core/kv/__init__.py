"""KV blocks: allocation, prefix caching and offload."""
