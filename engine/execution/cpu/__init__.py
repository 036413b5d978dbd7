"""Forward passes on CPUs.

In reading order: `backend` (compiled or eager passes), `compiled` (running a compiled pass), `packages` (compiling one,
in the background or by `python -m engine.execution.cpu`), `traced` (attention as the compiler sees it),
`paged_attention`, `half_weights` and `quantized_weights` (operators in C++), `kernels` (their registration with torch),
`threads` (how many a pass uses) and `host_memory` (how much is free).
"""
