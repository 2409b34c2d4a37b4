"""Weights snapshots in shared host memory and on disk: the cache, its budget, its files.

Owns every snapshot's memfd and file. Imports no request, model or process.
"""
