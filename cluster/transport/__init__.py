"""How it travels: frames, endpoint, credentials, channel (client), listener and server (worker)."""
