"""Scheduling policies: the default one, and published ones for comparison."""
