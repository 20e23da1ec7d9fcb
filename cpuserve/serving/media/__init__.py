"""The media of requests: readers of messages, caches of what was read, and places in prompts."""
