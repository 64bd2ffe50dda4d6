"""Slow, obvious references of the methods that act on weights: one number at a time."""

import math


def adam_with_decay(w, gradients, rate, lr, cautious, betas=(0.9, 0.999), eps=1e-8):
    """Adam with decoupled weight decay on a list of numbers, one list of gradients per step."""
    w, m, v = list(w), [0.0] * len(w), [0.0] * len(w)
    for t, gradient in enumerate(gradients, 1):
        for i, g in enumerate(gradient):
            m[i] = betas[0] * m[i] + (1 - betas[0]) * g
            v[i] = betas[1] * v[i] + (1 - betas[1]) * g * g
            u = m[i] / (1 - betas[0] ** t) / (math.sqrt(v[i] / (1 - betas[1] ** t)) + eps)
            decay = rate * w[i]
            if cautious and u * w[i] < 0:
                decay = 0.0
            w[i] = w[i] - lr * (u + decay)
    return w
