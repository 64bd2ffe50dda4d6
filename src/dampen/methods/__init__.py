"""Regularizers, one idea per file. A new method is one file, one test file and one line here; the
registry name, the command line, the contracts, the docs and the recipes follow from the class."""

from dampen.methods.anchor_kl import AnchorKL
from dampen.methods.arora_dropout import AroraDropout
from dampen.methods.attention_entropy import AttentionEntropy
from dampen.methods.blurred_attention import BlurredAttention
from dampen.methods.concrete_dropout import ConcreteDropout
from dampen.methods.consistency import Consistency
from dampen.methods.drop_attention import DropAttention
from dampen.methods.drop_connect import DropConnect
from dampen.methods.drop_head import DropHead
from dampen.methods.drop_key import DropKey
from dampen.methods.drop_path import DropPath
from dampen.methods.dropouts import (
    EmbeddingDropout,
    FeedForwardDropout,
    HiddenDropout,
    ProjectionDropout,
)
from dampen.methods.explicit_dropout import ExplicitDropout
from dampen.methods.hard_masking import HardMasking
from dampen.methods.head_diversity import HeadDiversity
from dampen.methods.hidden_key import hidden_key
from dampen.methods.input_masking import InputMasking
from dampen.methods.l2_sp import L2SP
from dampen.methods.layer_drop import LayerDrop
from dampen.methods.lora_dropout import LoRADropout
from dampen.methods.mixout import ExplicitMixout, Mixout
from dampen.methods.neftune import NEFTune
from dampen.methods.output_losses import ConfidencePenalty, Flooding, ZLoss
from dampen.methods.patch_dropout import PatchDropout
from dampen.methods.r_drop import RDrop
from dampen.methods.skip_ablation import SkipAblation
from dampen.methods.token_graying import TokenGraying
from dampen.methods.weight_average import WeightAverage
from dampen.methods.weight_decay import WeightDecay

__all__ = [
    "L2SP",
    "AnchorKL",
    "AroraDropout",
    "AttentionEntropy",
    "BlurredAttention",
    "ConcreteDropout",
    "ConfidencePenalty",
    "Consistency",
    "DropAttention",
    "DropConnect",
    "DropHead",
    "DropKey",
    "DropPath",
    "EmbeddingDropout",
    "ExplicitDropout",
    "ExplicitMixout",
    "FeedForwardDropout",
    "Flooding",
    "HardMasking",
    "HeadDiversity",
    "HiddenDropout",
    "InputMasking",
    "LayerDrop",
    "LoRADropout",
    "Mixout",
    "NEFTune",
    "PatchDropout",
    "ProjectionDropout",
    "RDrop",
    "SkipAblation",
    "TokenGraying",
    "WeightAverage",
    "WeightDecay",
    "ZLoss",
    "hidden_key",
]
