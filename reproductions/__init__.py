"""Experiments on the papers' questions. They use the installed package and are in no wheel."""
