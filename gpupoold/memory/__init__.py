"""Device memory below the engines: pages, address ranges, weights snapshots, paged KV.

No torch and no vLLM here: addresses are integers. ``contracts`` says what a
device must do, ``emulated`` and ``cuda`` do it, everything else is shared.
"""
