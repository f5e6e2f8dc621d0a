"""A deployed detector on a CPU: tiles that stay in its cache, and operators of oneDNN."""
