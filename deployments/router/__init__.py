"""One replica: router, round_loop, stream, generation."""
