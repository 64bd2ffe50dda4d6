"""Twenty models without a bug: torch.nn, timm, torchvision, transformers, x-transformers, vit-pytorch, dampen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import timm
import torch
import transformers as tr
from torch import nn

import dampen

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
TEXT = torch.randint(1, 50, (2, 7), generator=torch.Generator().manual_seed(0))
PADDING = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
FEATURES = torch.randn(3, 6, 16, generator=torch.Generator().manual_seed(0))
TOKENS = {"input_ids": TEXT, "attention_mask": PADDING}
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


def _timm(name: str, **kw: Any) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, num_classes=5, **kw)


def _x_transformers() -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=2, attn_dropout=0.1, ff_dropout=0.1, layer_dropout=0.1)
    return TransformerWrapper(num_tokens=50, max_seq_len=16, attn_layers=layers)


def _x_transformers_flash() -> nn.Module:
    from x_transformers import Encoder, TransformerWrapper

    layers = Encoder(dim=32, depth=2, heads=2, attn_flash=True, attn_dropout=0.1, ff_dropout=0.1)
    return TransformerWrapper(num_tokens=50, max_seq_len=16, attn_layers=layers)


def _vit_pytorch() -> nn.Module:
    from vit_pytorch import ViT

    return ViT(
        image_size=32,
        patch_size=8,
        num_classes=5,
        dim=32,
        depth=2,
        heads=2,
        mlp_dim=64,
        dropout=0.1,
    )


def _torchvision() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, 2, 2, 32, 64, dropout=0.1, attention_dropout=0.1, num_classes=5)


def _swin() -> nn.Module:
    from torchvision.models import SwinTransformer

    return SwinTransformer(
        [2, 2], 16, [2, 2], [2, 4], [4, 4], num_classes=5, stochastic_depth_prob=0.2
    )


def _gpt2() -> nn.Module:
    return tr.GPT2LMHeadModel(
        tr.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, n_positions=16)
    )


def _checkpointed() -> nn.Module:
    model = _gpt2()
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model


def _reentrant() -> nn.Module:
    model = _gpt2()
    model.gradient_checkpointing_enable({"use_reentrant": True})  # type: ignore[operator]
    return model


def _llama() -> nn.Module:
    return tr.LlamaForCausalLM(tr.LlamaConfig(vocab_size=50, **SIZES, attention_dropout=0.1))


def _t5() -> nn.Module:
    return tr.T5ForConditionalGeneration(
        tr.T5Config(vocab_size=50, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0)
    )  # fmt: skip


def _adapted() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        _gpt2(), LoraConfig(r=2, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
    )


def _regularized() -> nn.Module:
    model = dampen.models.ViT(image_size=32, patch_size=8, width=32, depth=2, heads=2, mlp=64)
    dampen.regularize(model, [dampen.DropKey(0.2), dampen.DropPath(0.1)])
    return model


def _encoder(**kw: Any) -> Callable[[], nn.Module]:
    return lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, **kw), 2)


HEALTHY: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "torch encoder": (_encoder(batch_first=True), FEATURES),
    "torch encoder, norm first": (_encoder(batch_first=True, norm_first=True), FEATURES),
    "torch transformer": (
        lambda: nn.Transformer(16, 2, 2, 2, 32, batch_first=True),
        (FEATURES, FEATURES),
    ),
    "torch LSTM": (lambda: nn.LSTM(16, 16, 2, dropout=0.2, batch_first=True), FEATURES),
    "torchvision ViT": (_torchvision, IMAGES),
    "torchvision Swin": (_swin, IMAGES),
    "timm ViT": (
        _timm("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2,
              drop_rate=0.1, attn_drop_rate=0.1, drop_path_rate=0.1),
        IMAGES,
    ),
    "timm DeiT3 with LayerScale": (
        _timm("deit3_small_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2,
              drop_path_rate=0.2),
        IMAGES,
    ),
    "timm ConvNeXt": (_timm("test_convnext", drop_path_rate=0.2), IMAGES),
    "timm EfficientNet": (_timm("test_efficientnet", drop_rate=0.2), IMAGES),
    "BERT": (lambda: tr.BertForMaskedLM(tr.BertConfig(vocab_size=50, **SIZES)), TOKENS),
    "BERT, eager": (
        lambda: tr.BertForSequenceClassification(
            tr.BertConfig(vocab_size=50, **SIZES, attn_implementation="eager")
        ),
        TOKENS,
    ),
    "GPT-2": (_gpt2, TOKENS),
    "GPT-2, checkpointed": (_checkpointed, {**TOKENS, "labels": TEXT}),
    "GPT-2, reentrant checkpoint": (_reentrant, TOKENS),
    "Llama": (_llama, TOKENS),
    "T5": (_t5, {**TOKENS, "labels": TEXT}),
    "HF ViT": (
        lambda: tr.ViTForImageClassification(
            tr.ViTConfig(image_size=32, patch_size=8, **SIZES, hidden_dropout_prob=0.1,
                         attention_probs_dropout_prob=0.1)
        ),
        IMAGES,
    ),
    "GPT-2 with LoRA": (_adapted, TOKENS),
    "x-transformers": (_x_transformers, TEXT),
    "x-transformers, flash": (_x_transformers_flash, TEXT),
    "vit-pytorch": (_vit_pytorch, IMAGES),
    "dampen, regularized": (_regularized, IMAGES),
    "an MLP with batch norm": (
        lambda: nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 2)),
        FEATURES[:, 0],
    ),
}  # fmt: skip
