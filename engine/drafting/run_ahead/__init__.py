"""Drafting for the likeliest verdicts while the target verifies: verdicts, foresight, branches, pace, drafter."""
