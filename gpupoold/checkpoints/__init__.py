"""Model checkpoints: search, download and checks. No torch, no engine."""
