"""Regularizers, one idea per file."""
