"""Which models' bytes are on the device: switches, page eviction, KV migration."""
