"""The control plane: everything that runs in ``gpupoold`` around the scheduling core.

Owns live requests, models, weights snapshots and the processes of workers and frontends. The
rooms below are layers: a contract in ``pyproject.toml`` says which may import which. Imports no
server (``admin``), engine (``worker``) or HTTP process (``frontend``).
"""
