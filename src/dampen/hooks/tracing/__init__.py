"""Attention that a model computes itself, found by following its tensors.

`eager` is the tracer, `products` the operations it knows, `scores` what methods do to the scores it
found, and `channels` says which channel of which linear layer an operand came from.
"""
