"""Absorbs LayerNorms, block by block, into the layers that read them."""
