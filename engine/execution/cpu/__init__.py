"""How is a pass computed on CPUs?

In reading order: `cpu_backend` (compiled or eager passes), `compilation/` (compiling them, in the background or by
`python -m engine.execution.cpu`), `kernels/` (operators in C++) and `host` (threads and free memory).
"""
