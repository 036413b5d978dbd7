"""What do operators see?

In reading order: `metrics` (the figures of `/metrics`), `draft_health` (whether drafts are of use), `tracing`
(OpenTelemetry spans) and `logs`.
"""
