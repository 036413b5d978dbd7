"""The worker processes that run the models.

In reading order: `actors`, `responder`, `tensor_parallel`, `draft_worker`, `proposals`, `draft_queue` and `features`.
"""
