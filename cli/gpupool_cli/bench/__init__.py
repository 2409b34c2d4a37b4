"""``gpupool bench``: measurements of a running daemon, or of a private one."""
