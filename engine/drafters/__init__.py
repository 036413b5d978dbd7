"""The drafters: who proposes."""
