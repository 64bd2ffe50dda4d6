"""What to run, as plain data: trials, recipes, plans, presets, methods written as text; and every mistake in them told.

Nothing here trains or reads results. `recipe` -> `plan` -> `trial`.
"""
