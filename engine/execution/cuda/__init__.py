"""How is a pass computed on NVIDIA GPUs, so that no bit depends on the batch?

In reading order: `cuda_backend` (prepares the others at load), `graphs` (a CUDA graph for each shape of a batch),
`static_pass` and `chain_pass` (what a graph records: a pass, or all passes of a draft), `compiled_layers` (compiled
once for every number of tokens), `linear` (layers whose rows round alike in every batch) and `kernels/` (in Triton).
"""
