"""The HTTP front end: the server's life, requests, responses, and a folder a dialect."""
