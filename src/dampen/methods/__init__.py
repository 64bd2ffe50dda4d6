"""Regularizers, one idea per file. A new method is one file, one test file and one line here; the registry name, the
command line, the contracts, the docs and the recipes follow from the class."""

from dampen.methods.arora_dropout import AroraDropout
from dampen.methods.blurred_attention import BlurredAttention
from dampen.methods.consistency import Consistency
from dampen.methods.drop_attention import DropAttention
from dampen.methods.drop_key import DropKey
from dampen.methods.explicit_dropout import ExplicitDropout
from dampen.methods.feed_forward_dropout import FeedForwardDropout
from dampen.methods.hard_masking import HardMasking
from dampen.methods.r_drop import RDrop
from dampen.methods.skip_ablation import SkipAblation
from dampen.methods.token_graying import TokenGraying

__all__ = [
    "AroraDropout",
    "BlurredAttention",
    "Consistency",
    "DropAttention",
    "DropKey",
    "ExplicitDropout",
    "FeedForwardDropout",
    "HardMasking",
    "RDrop",
    "SkipAblation",
    "TokenGraying",
]
