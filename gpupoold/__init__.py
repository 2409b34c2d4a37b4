"""gpupool: many LLMs on few GPUs, switched between tokens."""

__version__ = "0.1.0"
