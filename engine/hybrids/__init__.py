"""How does the state of linear layers roll back?

In reading order: `row_states` (how a pass continues states), `state_tensors` (the slots' content) and `state_slots`
(which request has which slots).
"""
