"""Attention with random keys hidden inside the kernel, for GPUs, in Triton.

Optional: Triton comes with torch's CUDA and ROCm builds. `device.py` runs on the card, `tiles.py`
chooses its tiles, `ops.py` makes torch operators of it, and `trial.py` compares it with dense
attention on this machine before it is used. Without Triton, or where the trial failed, attention
runs on torch.
"""
