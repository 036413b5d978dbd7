"""What does a person type?

In reading order: `commands` (every command of `paceline`), `serve` (a server on this machine), `progress` (of its
start), `pull` (models from the hub), `settings` (their table), `chat_session` (questions and answers) and `terminal`
(colours by origin, errors).
"""
