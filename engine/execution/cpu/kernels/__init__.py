"""Which products and attention do CPU passes run?

In reading order: `library` (builds and loads the C++ files), `paged_attention` and `panel_linear`.
"""
