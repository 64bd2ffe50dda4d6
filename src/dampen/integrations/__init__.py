"""Other people's trainers, one small file each, imported only when used: `from
dampen.integrations import hf`.

Methods that draw at random need none of this: they work under any trainer once the model is
regularized. Penalties and methods that compare two passes must reach the loss, and that is what
these files see to.
"""

from dampen._torch import declare_torchvision_operators

__all__ = ["declare_torchvision_operators"]

declare_torchvision_operators()
