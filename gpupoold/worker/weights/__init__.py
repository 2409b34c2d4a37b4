"""Loading weights into address ranges of the pool, from a checkpoint or a snapshot."""
