"""Statistics of norms, found again on images."""
