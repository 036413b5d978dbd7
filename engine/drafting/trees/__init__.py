"""How are alternatives drafted, a tree of tokens for each request?

In reading order: `levelwise` (a pass per level), `tree_drafter` (the likeliest nodes), `sampled_tree` (independent
chains), `run_ahead_trees`, which keep growing after they were sent, and `target_trees` (grown by the target itself).
"""
