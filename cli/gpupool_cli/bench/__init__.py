"""``gpupool bench``: measurements of a running daemon, or of one started for them."""
