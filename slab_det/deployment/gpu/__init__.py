"""A deployed detector on a GPU."""
