"""Which draft tokens stay: verifier (the target pass), coupled, rejection."""
