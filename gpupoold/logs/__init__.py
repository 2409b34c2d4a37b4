"""Log files of bounded size, the journal's format, bounds on repeated records.

Imports ``config`` (where the log goes) and nothing above ``config``.
"""
