"""Device memory below the engines: pages, address ranges, weights snapshots, paged KV.

Imports no torch and no vLLM: addresses are integers. ``device`` defines the interface of a device,
which ``emulated``, ``cuda`` and ``group`` implement; all other modules are shared.
"""
