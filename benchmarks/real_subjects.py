"""Small models as people write them, with a batch each, and what one would write into them by hand.

Each has the layout of a model in use (timm, transformers, nanoGPT) at a size where a step takes 10 to
40 ms on one thread, so that the cost of a method's own calls shows.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class Subject:
    """A model, its batch, and where its parts are.

    Args:
        model: in training mode, without any dropout of its own.
        forward: runs a copy of it on the batch and returns the logits.
        loss: of the logits.
        values: patterns of the linear layers that make v, or q, k and v.
        ffn: patterns of the linear layers of the feed-forward.
        branches: patterns of the modules whose output is a residual branch.
        dropped: patterns of the modules that drop attention weights, where the model has them.
        fused: q, k and v come from one layer.
        valid: bool (B, N), False on padding; None: nothing is padded.
    """

    model: nn.Module
    forward: Callable[[nn.Module], Tensor]
    loss: Callable[[Tensor], Tensor]
    values: tuple[str, ...]
    ffn: tuple[str, ...]
    branches: tuple[str, ...]
    dropped: tuple[str, ...] = ()
    fused: bool = False
    valid: Tensor | None = None

    def copy(self) -> nn.Module:
        """The model again, with the same parameters."""
        shared: dict[int, Any] = {id(p): p for p in self.model.parameters()}
        return copy.deepcopy(self.model, shared)

    def step(self, loss: Callable[[], Tensor]) -> Callable[[], None]:
        """Forward and backward; the optimizer's time is the same for all and left out."""
        parameters = list(self.model.parameters())

        def run() -> None:
            loss().backward()
            for p in parameters:
                p.grad = None

        return run


def named(model: nn.Module, ends: tuple[str, ...]) -> list[tuple[nn.Module, str, nn.Module]]:
    """Parent, name and module of everything whose path ends in one of the patterns."""
    pattern, found = re.compile(rf"(.*\.)?({'|'.join(ends)})"), []
    for path, module in model.named_modules() if ends else ():
        if pattern.fullmatch(path):
            parent, _, name = path.rpartition(".")
            found.append((model.get_submodule(parent), name, module))
    return found


def cross_entropy(target: Tensor) -> Callable[[Tensor], Tensor]:
    """Over all positions of the logits."""
    return lambda logits: F.cross_entropy(logits.flatten(0, -2), target.flatten())


# --- the models -------------------------------------------------------------------------------------


def vit() -> Subject:
    """timm's vit_tiny: 12 layers of 192, 17 tokens, batch 8."""
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=10)
    images, target = torch.randn(8, 3, 64, 64), torch.randint(10, (8,))
    return Subject(
        model, lambda m: m(images), cross_entropy(target), ("qkv",), ("fc1", "fc2"),
        ("attn", "mlp"), fused=True,
    )  # fmt: skip


class CausalAttention(nn.Module):
    """As nanoGPT has it, by SDPA or by hand."""

    def __init__(self, width: int, heads: int, context: int, eager: bool) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attn_dropout, self.heads, self.eager = nn.Dropout(0.0), heads, eager
        self.mask: Tensor
        mask = torch.ones(context, context).tril().view(1, 1, context, context)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.c_attn(x).split(d, dim=2)
        q, k, v = (t.view(b, n, self.heads, d // self.heads).transpose(1, 2) for t in (q, k, v))
        if self.eager:
            att = (q @ k.transpose(-2, -1)) * (1.0 / k.size(-1) ** 0.5)
            att = att.masked_fill(self.mask[:, :, :n, :n] == 0, float("-inf"))
            att = self.attn_dropout(F.softmax(att, dim=-1))
            y = att @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.c_proj(y.transpose(1, 2).contiguous().view(b, n, d))
        return out


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int, context: int, eager: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = CausalAttention(width, heads, context, eager)
        self.mlp = nn.Sequential()
        self.mlp.add_module("c_fc", nn.Linear(width, 4 * width))
        self.mlp.add_module("gelu", nn.GELU())
        self.mlp.add_module("c_proj", nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT(nn.Module):
    """A nanoGPT-like decoder."""

    def __init__(self, depth: int = 4, width: int = 128, context: int = 64, eager: bool = False):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, width), nn.Embedding(context, width)
        self.h = nn.ModuleList(GPTBlock(width, 4, context, eager) for _ in range(depth))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        out: Tensor = self.lm_head(self.ln_f(x))
        return out


def gpt(eager: bool = False) -> Subject:
    """nanoGPT-like: 4 layers of 128, 64 tokens, batch 8."""
    tokens = torch.randint(256, (8, 65))
    return Subject(
        GPT(eager=eager), lambda m: m(tokens[:, :-1]), cross_entropy(tokens[:, 1:]), ("c_attn",),
        (r"mlp\.c_fc", r"mlp\.c_proj"), ("attn", "mlp"), ("attn_dropout",) if eager else (), fused=True,
    )  # fmt: skip


def bert() -> Subject:
    """transformers' BERT: 4 layers of 128, up to 64 tokens, padded, batch 16."""
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(
        BertConfig(  # type: ignore[call-arg]
            vocab_size=1000, hidden_size=128, num_hidden_layers=4, num_attention_heads=4,
            intermediate_size=512, max_position_embeddings=64, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, num_labels=4,
        )
    )  # fmt: skip
    ids, target = torch.randint(1000, (16, 64)), torch.randint(4, (16,))
    valid = torch.arange(64) < torch.randint(24, 65, (16, 1))
    valid[0] = True
    return Subject(
        model, lambda m: m(input_ids=ids, attention_mask=valid.long()).logits,
        cross_entropy(target), ("self.value",), ("intermediate.dense", r"\d+\.output\.dense"),
        ("attention.output.dense", "output.dense"), valid=valid,
    )  # fmt: skip


def llama() -> Subject:
    """transformers' Llama: 4 layers of 128, 4 heads on 2 of keys, 64 tokens, batch 8."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=128, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, intermediate_size=344, max_position_embeddings=64,
            use_cache=False,
        )
    )  # fmt: skip
    tokens = torch.randint(256, (8, 65))
    return Subject(
        model, lambda m: m(input_ids=tokens[:, :-1]).logits, cross_entropy(tokens[:, 1:]),
        ("v_proj",), ("gate_proj", "up_proj", "down_proj"), ("self_attn", "mlp"),
    )  # fmt: skip


def swin() -> Subject:
    """timm's Swin: 2 + 2 layers of 48 and 96, windows of 16 tokens, batch 8."""
    from timm.models.swin_transformer import SwinTransformer

    model = SwinTransformer(
        img_size=64, patch_size=4, embed_dim=48, depths=(2, 2), num_heads=(3, 6), window_size=4,
        num_classes=10, drop_path_rate=0.0,
    )  # fmt: skip
    images, target = torch.randn(8, 3, 64, 64), torch.randint(10, (8,))
    return Subject(
        model, lambda m: m(images), cross_entropy(target), ("qkv",), ("fc1", "fc2"),
        ("attn", "mlp"), ("attn_drop",), fused=True,
    )  # fmt: skip


def whisper() -> Subject:
    """transformers' Whisper: 2 + 2 layers of 128, 100 frames, 32 tokens, batch 8."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    model = WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=256, num_mel_bins=20, d_model=128, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=512,
            decoder_ffn_dim=512, max_source_positions=100, max_target_positions=64, dropout=0.0,
            attention_dropout=0.0, activation_dropout=0.0, use_cache=False, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None,
            begin_suppress_tokens=None,
        )
    )  # fmt: skip
    mel, tokens = torch.randn(8, 20, 200), torch.randint(3, 256, (8, 33))
    return Subject(
        model, lambda m: m(input_features=mel, decoder_input_ids=tokens[:, :-1]).logits,
        cross_entropy(tokens[:, 1:]), ("v_proj",), ("fc1", "fc2"),
        ("self_attn", "encoder_attn", "fc2"),
    )  # fmt: skip


def detr() -> Subject:
    """transformers' DETR: 2 + 2 layers of 128, 64 places, 20 queries, a small ResNet, batch 8."""
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(  # type: ignore[call-arg]
        embedding_size=16, hidden_sizes=[16, 32, 64, 128], depths=[1, 1, 1, 1],
        layer_type="basic", out_features=["stage4"],
    )  # fmt: skip
    model = DetrForObjectDetection(
        DetrConfig(  # type: ignore[call-arg]
            use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
            backbone_config=backbone, d_model=128, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=512,
            decoder_ffn_dim=512, num_queries=20, num_labels=4, dropout=0.0, attention_dropout=0.0,
            activation_dropout=0.0, auxiliary_loss=False,
        )
    )  # fmt: skip
    images, target = torch.randn(8, 3, 256, 256), torch.randint(5, (8, 20))
    return Subject(
        model, lambda m: m(pixel_values=images).logits, cross_entropy(target), ("v_proj",),
        ("fc1", "fc2"), ("self_attn", "encoder_attn", "fc2"),
    )  # fmt: skip


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "timm vit_tiny": vit,
    "nanoGPT, SDPA": gpt,
    "nanoGPT, eager": lambda: gpt(eager=True),
    "BERT, padded": bert,
    "Llama, grouped keys": llama,
    "timm Swin": swin,
    "Whisper": whisper,
    "DETR": detr,
}


def make(name: str) -> Subject:
    """One of `SUBJECTS`, in training mode, with fixed weights and batch."""
    torch.manual_seed(0)
    subject = SUBJECTS[name]()
    subject.model.train()
    return subject
