"""What is counted?

In reading order: `drafts` (drafts, and those prepared ahead), `requests` (their times and lengths) and `preparation`
(work that no round should wait for).
"""
