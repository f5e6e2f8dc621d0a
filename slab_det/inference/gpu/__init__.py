"""A deployed detector on a GPU: one CUDA graph per image size, and Triton kernels."""
