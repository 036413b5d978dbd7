"""The processes that compute: actors, loading, responder, tensor_parallel."""
