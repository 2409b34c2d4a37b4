"""The worker's serving thread: messages in, turns, steps, outputs out."""
