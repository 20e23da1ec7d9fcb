"""/v1/files: upload, list, read and delete files for batches."""
