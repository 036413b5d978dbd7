"""What learning brings to a draft that meets other texts: `python -m tests.bench learning`.

In reading order: `traffic` (a draft of novels, and the target's own texts in three domains), `curve` (a study that
drafts for them, against the frozen draft), `picture` and `comparison`.
"""
