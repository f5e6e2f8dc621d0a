"""What rounding explains of a difference between two models, and whether PyTorch's own kernels are right."""
