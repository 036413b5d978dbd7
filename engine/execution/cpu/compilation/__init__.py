"""How are passes compiled on CPUs?

In reading order: `compiled_forward` (a compiled pass), `packages` (cached on disk) and `background_compiler` (made
while the model is served eagerly).
"""
