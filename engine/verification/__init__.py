"""Which draft tokens stay: verifier (the target pass), rule (what one needs, and all by name), coupled, rejection."""
