"""Event logs of the scheduling core as files, and their replay without a daemon."""
