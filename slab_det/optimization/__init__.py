"""The forms in which a detector can run, what was measured of each, and the folder that serves the chosen one."""
