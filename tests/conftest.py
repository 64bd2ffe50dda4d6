"""Shared set-up: torchvision's cure before anything imports it, and one thread per test process."""

import torch

from dampen.torchvision_cure import cure_torchvision

cure_torchvision()
torch.set_num_threads(1)
