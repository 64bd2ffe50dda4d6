"""The four models on which contracts are checked: an own ViT, a timm ViT, a causal Llama, a padded
BERT, all tiny."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dampen._torch import declare_torchvision_operators
from dampen.models import FeatureEncoder, ViT

# with patches of 4 and a class token: 65 tokens, enough for the fused kernel
IMAGE = 32
TOKENS = 9


@dataclass(frozen=True)
class Subject:
    """A model to try a regularizer on, with a batch, its logits, and what must not matter to
    them."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]]
    logits: Callable[[Any], Tensor]
    hide: Callable[[dict[str, Tensor]], tuple[dict[str, Tensor], Tensor]] | None = None
    """A second batch that differs only where some positions must not look, and those positions (B,
    N)."""
    padded: bool = False
    """Whether the hidden tokens are padding: then penalties must not move either."""

    library: str = ""
    """The package it comes from, where that is not dampen itself."""

    def missing(self) -> str:
        """The library without which it cannot be built; empty where it can."""
        if self.library and importlib.util.find_spec(self.library) is None:
            return self.library
        return ""

    def model(self, seed: int = 0) -> nn.Module:
        """A fresh model in training mode, the same for the same seed.

        Args:
            seed: of the weights or of the batch.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build().train()

    def inputs(self, seed: int = 1) -> dict[str, Tensor]:
        """A batch, the same for the same seed.

        Args:
            seed: of the weights or of the batch.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.batch()


def _vit(depth: int = 2) -> nn.Module:
    return ViT(image_size=IMAGE, patch_size=4, classes=5, width=16, depth=depth, heads=2, mlp=24)


def _timm() -> nn.Module:
    declare_torchvision_operators()
    import timm

    return timm.create_model(
        "vit_tiny_patch16_224",
        img_size=IMAGE,
        patch_size=4,
        embed_dim=16,
        depth=2,
        num_heads=2,
        num_classes=5,
    )


def _llama() -> nn.Module:
    declare_torchvision_operators()
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 19,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
    }
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, **heads, max_position_embeddings=64, use_cache=False)
    return LlamaForCausalLM(config)


def _bert() -> nn.Module:
    declare_torchvision_operators()
    from transformers import BertConfig, BertForTokenClassification

    sizes: dict[str, Any] = {
        "vocab_size": 19,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
    }
    rest: dict[str, Any] = {"num_attention_heads": 2, "num_labels": 5}
    rest |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(**sizes, **rest, max_position_embeddings=64)
    return BertForTokenClassification(config)


def _images(name: str) -> Callable[[], dict[str, Tensor]]:
    return lambda: {name: torch.randn(3, 3, IMAGE, IMAGE)}


def _text() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(1, 19, (3, TOKENS))}


def _padded_text() -> dict[str, Tensor]:
    mask = torch.ones(3, TOKENS, dtype=torch.long)
    mask[1, 6:], mask[2, 3:] = 0, 0
    return {**_text(), "attention_mask": mask}


def _change_future(batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    ids = batch["input_ids"].clone()
    ids[:, 5:] = (ids[:, 5:] + 7) % 19
    return {**batch, "input_ids": ids}, (torch.arange(TOKENS) < 5).expand(3, -1)


def _change_padding(batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    kept = batch["attention_mask"].bool()
    ids = torch.where(kept, batch["input_ids"], (batch["input_ids"] + 7) % 19)
    return {**batch, "input_ids": ids}, kept


SUBJECTS = {
    s.name: s
    for s in (
        Subject("vit", _vit, _images("images"), lambda out: out),
        Subject("timm_vit", _timm, _images("x"), lambda out: out, library="timm"),
        Subject(
            "llama", _llama, _text, lambda out: out.logits, _change_future, library="transformers"
        ),
        Subject(
            "bert",
            _bert,
            _padded_text,
            lambda out: out.logits,
            _change_padding,
            padded=True,
            library="transformers",
        ),
    )
}


def _encoder(depth: int = 2) -> nn.Module:
    return FeatureEncoder(
        features=6, classes=5, width=16, depth=depth, heads=2, mlp=24, max_tokens=64
    )


ENCODER = Subject("encoder", _encoder, lambda: {"x": torch.randn(3, TOKENS, 6)}, lambda out: out)
"""Sequences of any length, for what depends on it."""

SHALLOW = Subject("vit", lambda: _vit(depth=1), _images("images"), lambda out: out)
"""One layer, for the compilers, whose time grows with the number of layers."""

SHORT_ENCODER = Subject("encoder", lambda: _encoder(depth=1), ENCODER.batch, lambda out: out)
"""The same of the encoder."""
