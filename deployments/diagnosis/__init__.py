"""Is it well, and is it true?

In reading order: `finding` (what a check found, and what to do), `machine` and `models` (checks before a start),
`trial` (the pair with and without drafts), `doctor` (these checks together), `http_client` (requests to a server),
`running` (its checks), `auditors` (who checks recorded answers), `audit_report` (what that says) and `prove` (audits
every way of asking).
"""
