"""From logits to a token: params (what a client asks for), logits (where it applies), noise (shared), grammar."""
