"""Models from registration to removal: intake, loading, quarantine, unloading.

May import every other room except ``views``.
"""
