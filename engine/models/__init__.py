"""Which model is this, and where are its weights?

In reading order: `source` (which models are served, and a model's files, each read once), `registry` (the kinds by
their configuration), `loader` (from safetensors to a device), `shards` (the slices of one tensor-parallel rank),
`reducer` (what ranks sum and agree on),
`quantization` (int8 and int4, at load or as saved), `fusion` (q/k/v and gate/up as one product), `layer_attention`
(each layer's attention parameters), `causal_lm` (the loaded module), `first_layers` (the model that a target
self-drafts with), `encoder_decoder` (the served ones, their limits and prompts) and `t5` (them in a paged cache).
"""
