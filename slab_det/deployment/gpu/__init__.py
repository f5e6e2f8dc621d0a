"""A deployed detector on a GPU: one CUDA graph for each size of image, and kernels in Triton."""
