"""The worker processes that run the models.

In reading order: `actors` (what Ray's actors share, and the target's ranks), `responder` (from a verification to its
reply), `tensor_parallel` (the process group of the ranks), `draft_worker` (leases and their sockets), `draft_queue`
(proposals, in order) and `features` (from the target to a head on the draft worker).
"""
