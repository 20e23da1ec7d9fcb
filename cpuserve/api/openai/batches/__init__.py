"""/v1/batches: create, read, list and cancel batches of requests in uploaded files."""
