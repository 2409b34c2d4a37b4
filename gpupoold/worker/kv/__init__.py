"""Residency of models' bytes on the device: switches, page eviction."""
