"""The terminal UI: `gpupool top`."""
