"""A backend that computes on the CPU and takes the time of a named GPU, for benches and tests.

Texts, acceptance and messages are those of the loaded model; a pass takes as long as a roofline says that a named model
would take on named hardware. While a GPU works, its host's cores are free, and so are they here: the process sleeps.

In reading order: `parameters` (figures of hardware and models, with their sources), `roofline` (the time of a pass),
`device` (the names, and who may use them), `backend`.
"""
