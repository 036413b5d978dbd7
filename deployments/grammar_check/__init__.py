"""Compiles clients' grammars in a process that can be killed.

In reading order: `compiler` (from request fields to a checked grammar), `checker` (starts, asks and kills the process)
and `process` (what runs in it).
"""
