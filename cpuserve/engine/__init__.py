"""The engine loop, the messages around it, and the clients that talk to it."""
