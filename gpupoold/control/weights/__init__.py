"""Weights snapshots in host memory and on disk; imports no request, model or process."""
