"""Compiles clients' grammars in processes that end if they take too long.

In reading order: `compiler` (from request fields to a checked grammar), `checker` (starts and asks the process) and
`process` (what runs in it: it forks for each grammar).
"""
