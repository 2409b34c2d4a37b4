"""``gpupool plan`` and ``gpupool simulate``: inputs, runs, tables and plots."""
