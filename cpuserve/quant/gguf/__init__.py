"""The weight types of GGUF files: blocks of codes and scales, as kernels read them."""
