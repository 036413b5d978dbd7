"""What is counted?

In reading order: `drafts` (draft tokens and run-ahead), `requests` (times and lengths) and `preparation`
(compilations).
"""
