"""Whether two models are the same: how far apart they are, and how much of it rounding explains."""
