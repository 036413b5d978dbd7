"""The verification rules: which draft tokens stay, and the target's own token after them."""
