"""Studies: the comparison of one's own training. `compare` starts one, `study` is what comes back.

Everything here stands on the lab's plans, engines and records; nothing below imports it.
"""
