"""Files and batches on the disk of the server."""
