"""Access control: API key secrets, token buckets, peers of the admin socket, TLS files."""
