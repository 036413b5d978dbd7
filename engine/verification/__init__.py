"""Which draft tokens are committed, in reading order.

rule (what a rule needs and decides, and every rule by name), verifier (the target's pass), coupled, rejection.
"""
