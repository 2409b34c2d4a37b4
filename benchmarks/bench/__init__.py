"""``gpupool bench``: measurements on a private daemon, each with a limit or rival."""
