"""Scheduling policies: the default one, and published ones to compare with."""
