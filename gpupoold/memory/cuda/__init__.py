"""An NVIDIA GPU's memory through the CUDA driver API: pages, copy streams, pinning."""
