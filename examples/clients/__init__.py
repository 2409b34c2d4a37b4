"""Clients of gpupool's HTTP API, one file each; ``docs/clients.md`` describes them."""
