"""The worker processes that run the models.

In reading order: `actors` (the Ray actors), `responder` (from a request to a reply), `loading` (the model of a worker)
and `tensor_parallel` (the process group of the target's ranks).
"""
