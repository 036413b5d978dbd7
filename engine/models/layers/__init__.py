"""What are a model's layers replaced by?

In reading order: `layer_attention` (each layer's attention parameters), `mixed_layers` (what differs between them),
`latent` (latent attention, cached as latents), `layer_state` (what a linear layer keeps), `recurrences` (how it
computes), `linear_layers` (replaces transformers' functions for it), `fusion` (q/k/v and gate/up as one product),
`packed_formats` (how checkpoints store quantised weights), `quantization` (int8, int4 and fp8, at load or as saved),
and `experts` (mixtures, by grouped products).
"""
