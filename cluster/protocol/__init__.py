"""The messages between the Router and its workers.

In reading order: `messages`, `prefix_delta` and `validation`.
"""
