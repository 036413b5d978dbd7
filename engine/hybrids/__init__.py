"""How does the state of linear layers roll back?

In reading order: `row_states` (how the rows of a pass continue their states), `state_tensors` (the slots that hold
them) and `state_slots` (whose slots they are, and which can be shared).
"""
