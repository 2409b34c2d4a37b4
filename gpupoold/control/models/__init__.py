"""Models from registration to removal; may import every other room except ``views``."""
