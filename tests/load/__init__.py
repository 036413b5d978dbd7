"""`python -m tests.load`: send load to a server, say what its users would see, and whether the texts were right.

Reading order: options (the command line), server (what is at the other end), prompts, traces, plan (which
requests there are, and their bodies), client and records (one request), loops (when requests are sent), arms (ways to
speculate that take turns), run (all of it together), sweep, summary, reference (texts), report.
`tool_suite` (`python -m tests.load tools`) sends the conversations of `tool_cases`.
`ci` runs the load test against the bundled pair.
"""
