"""Model checkpoints: finding, downloading and checking them. No torch, no engine."""
