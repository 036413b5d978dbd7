"""How are alternatives drafted, a tree of tokens for each request?

In reading order: `levelwise` (a pass per level), `tree_drafter` (the likeliest nodes), `sampled_tree`,
`run_ahead_trees` (trees that grow after they were sent), and `target_trees` (grown in the target's process).
"""
