"""A deployed detector on a CPU: blocks in tiles that stay in its cache, oneDNN, Winograd and RoIAlign."""
