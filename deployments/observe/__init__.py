"""What do operators see?

In reading order: `metrics` (the figures of `/metrics`), `tracing` (OpenTelemetry spans) and `logs`.
"""
