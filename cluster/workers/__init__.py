"""The worker processes that run the models.

In reading order: `actors` (the Ray actors), `responder` (from a request to a reply), `features` (from the target to a
head on the draft worker), `tensor_parallel` (the process group of the target's ranks), `draft_pool` (the proposals of
several groups, in order) and `pool_worker` (their sockets).
"""
