"""The paced comparison: what drafts gain, and what a round takes besides its passes, at the pace of GPUs.

In reading order: `roofline` (the time of a pass), `light_pair` (models for many rows), `comparison` and `tables`. Then
`group` (a group without Ray and HTTP) and `virtual/` (its time).
"""
