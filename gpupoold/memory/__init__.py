"""Device memory below the engines: pages, address ranges, weights snapshots, paged KV.

Imports no torch and no vLLM: addresses are integers. ``contracts`` defines the interface of a
device, which ``emulated`` and ``cuda`` implement; all other modules are shared.
"""
