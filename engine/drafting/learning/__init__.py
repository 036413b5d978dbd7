"""How does the draft learn?

In reading order: `lessons` (which texts teach, and which are held out), `whole_text` (attention that gradients pass),
`learner` (a step, and what weights are worth), `head_learner` (the same for a trained head), `swap_watch` (whether a
swap holds) and `study` (the thread that learns while the draft worker is idle).
"""
