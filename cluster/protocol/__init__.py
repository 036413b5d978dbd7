"""What travels: messages, prefix_delta, validation."""
