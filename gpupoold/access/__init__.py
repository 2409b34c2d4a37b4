"""Who may do what: API keys, what they may use up, callers of the admin socket, TLS files."""
