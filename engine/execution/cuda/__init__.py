"""Fast passes on NVIDIA GPUs, made so that no bit depends on the batch.

- `backend`: `CudaBackend`, which prepares the following at load.
- `graphs`: a CUDA graph for each shape of a decoding batch.
- `static_pass`: a pass over buffers of fixed size, which is what a graph records.
- `compiled`: decoder layers, compiled once for every number of tokens.
- `linear`: matrix products that sum in one order.
- `paged_attention`: attention that splits a context in one way.
- `noise_kernel`: the noise of a whole vocabulary.
"""
