"""Two passes in one step (Consistency, RDrop): what both share is computed once.

`reuse` plans and remembers, `own_randomness` knows what a model draws by itself. Used
by `hooks` and `handle`.
"""
