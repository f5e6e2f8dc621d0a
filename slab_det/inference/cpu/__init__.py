"""Fast layers for CPUs: Winograd's convolution and RoIAlign; patches as a product, where PyTorch has wrong kernels."""
