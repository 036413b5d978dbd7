"""Passes on CPUs: kernels, paged_attention, half_weights, compiled, packages, threads."""
