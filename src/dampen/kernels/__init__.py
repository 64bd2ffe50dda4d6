"""Attention with the stages open, and which kernel computes it: from a measured table, by device,
dtype and length.

`attend.attention` is public as `dampen.attention`; `tuning` measures the table on the user's own
machine.
"""
