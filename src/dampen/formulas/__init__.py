"""The old name of `dampen.functional`."""
