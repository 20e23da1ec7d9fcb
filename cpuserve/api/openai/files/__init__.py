"""/v1/files: upload, list, read and delete input and result files of batches."""
