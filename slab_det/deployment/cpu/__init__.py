"""Fast layers for CPUs: blocks in tiles that fit the cache, linear layers in oneDNN, Winograd and RoIAlign."""
