"""Removes hidden channels: what each costs, which go, and the fit of the layers that read the others."""
