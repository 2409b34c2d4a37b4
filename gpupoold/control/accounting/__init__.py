"""Counts of requests, tokens, turns and minutes; imports the record of a live request alone."""
