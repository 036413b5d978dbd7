"""Which model is this, and where are its weights?

In reading order: `source` (which models are served, and a model's files, each read once), `registry` (the kinds by
their configuration), `loader` (from safetensors to a device), `weights` (reads the files), `shards` (the slices of one
tensor-parallel rank), `reducer` (how ranks combine their parts), `quantization` (int8, int4 and fp8, at load or as
saved), `experts` (mixtures, by grouped products), `fusion` (q/k/v and gate/up as one product), `layer_attention` (each
layer's attention parameters), `causal_lm` (the loaded module), `first_layers` (the model that a target self-drafts
with), `encoder_decoder` (the served ones, their limits and prompts) and `t5` (them in a paged cache).
"""
