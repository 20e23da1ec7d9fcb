"""POST, GET and DELETE /v1/conversations."""
