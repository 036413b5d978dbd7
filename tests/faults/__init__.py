"""Processes are killed or stopped under streams; what the clients receive is compared with a run without faults.

In reading order: `streams` (eight seeded requests and what comes back), `server` (the application, and its processes by
name), `faults` (whom each fault hits, and how), `trial` (one fault under the streams). `python -m tests.faults report`
prints a table of all faults.
"""
