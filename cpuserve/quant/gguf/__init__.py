"""The weight types of GGUF files: how the kernels read their blocks of codes and scales."""
