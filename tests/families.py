"""Small random models of every supported family, with a batch each. No downloads."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import timm
import torch
import transformers as tr
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

import dampen
from reproductions.models.seq2seq import Seq2Seq

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
TEXT = torch.randint(1, 50, (2, 7), generator=torch.Generator().manual_seed(0))
PADDING = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
FEATURES = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(0))
MEMORY = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))


@dataclass
class Family:
    """How to build a model, what to feed it, and what should be found in its layers."""

    build: Callable[[], nn.Module]
    inputs: dict[str, Any]
    layers: int
    roles: set[str]  # of the last layer
    branches: list[str] = field(default_factory=lambda: ["attention", "ffn"])
    shares_v: bool = True  # v at the socket is the bare projection

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.build().train()
        for module in model.modules():  # so that the plain model is deterministic in training
            if isinstance(module, nn.Dropout | nn.Dropout2d):
                module.p = 0.0
            if hasattr(module, "drop_prob"):
                module.drop_prob = 0.0
            for name in (
                "dropout",
                "attention_dropout",
                "attn_dropout",
                "dropout_prob",
                "activation_dropout",
            ):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)
        return model


def output(value: Any) -> torch.Tensor:
    """The first tensor of a model output."""
    return value if isinstance(value, torch.Tensor) else value[0]


def _timm(name: str, **kw: Any) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, num_classes=5, **kw)


def _encoder_layer(**kw: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, **kw)


class NanoBlock(nn.Module):
    """What people write themselves: SDPA called through a helper of their own, oddly named modules."""

    def __init__(self, d: int = 16):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.mixer = NanoMixer(d)
        self.net = nn.Sequential(nn.Linear(d, 32), nn.GELU(), nn.Linear(32, d))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mixer(self.ln_1(x))
        return x + self.net(self.ln_2(x))


class NanoMixer(nn.Module):
    def __init__(self, d: int):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (2, -1)).transpose(1, 2)
            for t in self.c_attn(x).split(x.shape[-1], dim=-1)
        )
        return self.c_proj(_mix(q, k, v).transpose(1, 2).flatten(-2))


def _mix(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _hf_sizes(layers: int = 2) -> dict[str, Any]:
    return {
        "hidden_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }


def _detr() -> nn.Module:
    backbone = tr.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"]
    )
    return tr.DetrForObjectDetection(
        tr.DetrConfig(
            use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone, d_model=32,
            encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=64, decoder_ffn_dim=64, num_queries=5, dropout=0.0,
        )
    )  # fmt: skip


def _wav2vec2() -> nn.Module:
    config = tr.Wav2Vec2Config(
        **_hf_sizes(), conv_dim=(32, 32), conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, layerdrop=0.0, mask_time_prob=0.0,
        hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0,
    )  # fmt: skip
    return tr.Wav2Vec2Model(config)


_SEPARATE = {"q", "k", "v", "out", "ffn_in", "ffn_out"}
_FUSED = {"qkv", "out", "ffn_in", "ffn_out"}
_BOTH = ["attention", "attention", "ffn"]

FAMILIES = {
    "own_vit": Family(
        lambda: dampen.models.ViT(width=16, depth=2, heads=2, mlp=24, classes=5), {"images": IMAGES}, 2, _FUSED
    ),
    "own_encoder": Family(
        lambda: dampen.models.FeatureEncoder(features=16, classes=5, width=16, depth=2, heads=2, mlp=24, max_tokens=9),
        {"x": FEATURES, "padding": PADDING == 0}, 2, _FUSED,
    ),
    "own_seq2seq": Family(
        lambda: Seq2Seq(source_vocab=50, target_vocab=50, width=16, depth=2, heads=2, mlp=24),
        {"source": TEXT * PADDING, "target": TEXT}, 4, _SEPARATE, _BOTH,
    ),
    "own_language": Family(
        lambda: dampen.models.LanguageModel(vocab=50, width=16, depth=2, heads=2, mlp=24, context=16),
        {"tokens": TEXT}, 2, _FUSED,
    ),
    "user_code": Family(lambda: nn.Sequential(NanoBlock(), NanoBlock()), {"input": FEATURES}, 2, _FUSED),
    "encoder_post": Family(
        lambda: nn.TransformerEncoder(_encoder_layer(batch_first=True), 2, enable_nested_tensor=False),
        {"src": FEATURES, "src_key_padding_mask": PADDING == 0}, 2, _SEPARATE,
    ),
    "encoder_pre_seq_first": Family(
        lambda: nn.TransformerEncoder(_encoder_layer(norm_first=True), 2, enable_nested_tensor=False),
        {"src": FEATURES.transpose(0, 1), "src_key_padding_mask": PADDING == 0}, 2, _SEPARATE,
    ),
    "encoder_causal": Family(
        lambda: nn.TransformerEncoder(_encoder_layer(batch_first=True, norm_first=True), 2, enable_nested_tensor=False),
        {"src": FEATURES, "mask": nn.Transformer.generate_square_subsequent_mask(7), "is_causal": True}, 2, _SEPARATE,
    ),
    "encoder_layer_alone": Family(lambda: _encoder_layer(batch_first=True), {"src": FEATURES}, 1, _SEPARATE),
    "decoder_post": Family(
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32, batch_first=True), 2),
        {"tgt": FEATURES, "memory": MEMORY, "tgt_mask": nn.Transformer.generate_square_subsequent_mask(7),
         "tgt_is_causal": True}, 2, _SEPARATE, _BOTH,
    ),
    "decoder_pre_seq_first": Family(
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32, norm_first=True), 2),
        {"tgt": FEATURES.transpose(0, 1), "memory": MEMORY.transpose(0, 1),
         "memory_key_padding_mask": PADDING[:, 2:] == 0}, 2, _SEPARATE, _BOTH,
    ),
    "transformer": Family(
        lambda: nn.Transformer(16, 2, 2, 2, 32, batch_first=True), {"src": MEMORY, "tgt": FEATURES}, 4, _SEPARATE, _BOTH
    ),
    "timm_vit": Family(
        _timm("vit_tiny_patch16_224", img_size=32, patch_size=4, embed_dim=32, depth=2, num_heads=2, init_values=0.1,
              drop_path_rate=0.1), {"x": IMAGES}, 2, _FUSED,
    ),
    "timm_deit": Family(
        _timm("deit_tiny_distilled_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2),
        {"x": IMAGES}, 2, _FUSED,
    ),
    "timm_swin": Family(
        _timm("swin_tiny_patch4_window7_224", img_size=32, window_size=4, depths=(2, 2), num_heads=(2, 4),
              embed_dim=16),
        {"x": IMAGES}, 4, _FUSED,
    ),
    "timm_eva": Family(
        _timm("eva02_tiny_patch14_224", img_size=28, depth=2, embed_dim=32, num_heads=2),
        {"x": IMAGES[..., :28, :28]}, 2, _FUSED,
    ),
    "timm_beit": Family(
        _timm("beit_base_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=32, num_heads=2),
        {"x": IMAGES}, 2, _FUSED,
    ),
    "hf_vit": Family(
        lambda: tr.ViTForImageClassification(tr.ViTConfig(**_hf_sizes(), image_size=32, patch_size=8)),
        {"pixel_values": IMAGES}, 2, _SEPARATE,
    ),
    "hf_bert": Family(
        lambda: tr.BertForSequenceClassification(tr.BertConfig(vocab_size=50, **_hf_sizes())),
        {"input_ids": TEXT, "attention_mask": PADDING}, 2, _SEPARATE,
    ),
    "hf_gpt2": Family(
        lambda: tr.GPT2LMHeadModel(tr.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2)),
        {"input_ids": TEXT, "attention_mask": PADDING}, 2, _FUSED,
    ),
    "hf_llama": Family(
        lambda: tr.LlamaForCausalLM(
            tr.LlamaConfig(vocab_size=50, **(_hf_sizes() | {"num_attention_heads": 4}), num_key_value_heads=2)
        ),
        {"input_ids": TEXT, "attention_mask": PADDING}, 2, _SEPARATE,
    ),
    "hf_t5": Family(
        lambda: tr.T5ForConditionalGeneration(
            tr.T5Config(vocab_size=50, d_model=32, d_kv=8, num_layers=2, num_heads=4, d_ff=64, dropout_rate=0.0,
                        decoder_start_token_id=0, feed_forward_proj="gated-gelu")
        ),
        {"input_ids": TEXT, "attention_mask": PADDING, "decoder_input_ids": TEXT}, 4, _SEPARATE, _BOTH,
    ),
    "hf_detr": Family(_detr, {"pixel_values": IMAGES}, 4, _SEPARATE, _BOTH),
    "hf_wav2vec2": Family(
        _wav2vec2, {"input_values": torch.randn(2, 400, generator=torch.Generator().manual_seed(0))}, 2, _SEPARATE
    ),
    "hf_albert": Family(
        lambda: tr.AlbertModel(tr.AlbertConfig(vocab_size=50, embedding_size=16, **_hf_sizes(3))),
        {"input_ids": TEXT, "attention_mask": PADDING}, 1, _SEPARATE, ["attention", "ffn"] * 3,
    ),
}  # fmt: skip


def graphs_of_a_step(model: nn.Module) -> int:
    """How many graphs a language model with DropKey is compiled to over three steps."""
    torch._dynamo.reset()
    reg, counter = dampen.regularize(model, dampen.DropKey(0.4)), CompileCounter()
    run = torch.compile(model, backend=counter)
    for step in range(3):
        reg.progress(step / 3)
        run(input_ids=TEXT, use_cache=False).logits.sum().backward()
    torch._dynamo.reset()
    return int(counter.frame_count)
