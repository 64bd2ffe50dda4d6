"""Small random models of vit-pytorch, x-transformers, open_clip and torchtune, with a batch each.

Most classes are built from the names of their arguments (`SIZES`); the tables hold what those names do not say."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.tiny_models import NotBuilt, Subject, outputs_of, settle

SIZES: dict[str, Any] = {
    "image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 64,
    "dim_head": 8, "channels": 3, "frames": 4, "frame_patch_size": 2, "image_patch_size": 8, "cls_depth": 1,
    "spatial_depth": 2, "temporal_depth": 2, "seq_len": 32, "max_frames": 4, "max_tokens_per_depth": (8, 6),
    "num_residual_streams": 2, "freq_patch_size": 4, "num_slots": 4, "ndim": 2, "input_shape": (32, 32),
}  # fmt: skip

IMAGE = (2, 3, 32, 32)
_STAGES = {"dim": 16, "depth": (1, 1, 1, 1), "heads": 2}
VIT_PYTORCH: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "cct": ({"img_size": 32, "embedding_dim": 32, "num_layers": 2, "num_heads": 4, "num_classes": 5}, IMAGE),
    "cct_3d": (
        {"img_size": 32, "num_frames": 4, "embedding_dim": 32, "num_layers": 2, "num_heads": 4, "num_classes": 5},
        (2, 3, 4, 32, 32),
    ),
    "cross_vit": (
        {
            "image_size": 32, "num_classes": 5, "sm_dim": 32, "lg_dim": 48, "sm_patch_size": 4, "lg_patch_size": 8,
            "sm_enc_depth": 1, "lg_enc_depth": 2, "cross_attn_depth": 1, "depth": 2,
        },
        IMAGE,
    ),
    "crossformer": ({"dim": (16, 32, 32, 32), "depth": (1, 1, 2, 1), "num_classes": 5}, (2, 3, 224, 224)),
    "cvt": (
        {
            "num_classes": 5, "s1_emb_dim": 16, "s2_emb_dim": 16, "s3_emb_dim": 32, "s1_depth": 1, "s2_depth": 1,
            "s3_depth": 2, "s2_heads": 2, "s3_heads": 2,
        },
        (2, 3, 64, 64),
    ),
    "levit": (
        {"image_size": 64, "num_classes": 5, "dim": (16, 24, 32), "depth": 2, "heads": (2, 2, 2), "mlp_mult": 2},
        (2, 3, 64, 64),
    ),
    "look_vit": ({"dim": 32, "image_size": 32, "num_classes": 5, "patch_size": 8, "highres_patch_size": 4, "depth": 2,
                  "heads": 4, "cross_attn_heads": 4, "dim_head": 8, "cross_attn_dim_head": 8}, IMAGE),
    "max_vit": ({"num_classes": 5, "dim": 16, "depth": (1, 1), "dim_head": 8, "window_size": 4}, (2, 3, 64, 64)),
    "max_vit_with_registers": (
        {"num_classes": 5, "dim": 16, "depth": (1, 1), "dim_head": 8, "window_size": 4},
        (2, 3, 64, 64),
    ),
    "mobile_vit": (
        {
            "image_size": (64, 64), "dims": [16, 24, 32], "channels": [8, 8, 16, 16, 24, 24, 32, 32, 48, 48, 64],
            "num_classes": 5,
        },
        (2, 3, 64, 64),
    ),
    "nest": (
        {
            "image_size": 32, "patch_size": 4, "num_classes": 5, "dim": 16, "heads": 2, "num_hierarchies": 2,
            "block_repeats": (1, 2),
        },
        IMAGE,
    ),
    "pit": ({**SIZES, "depth": (1, 2)}, (2, 3, 32, 32)),
    "regionvit": ({"dim": (16, 16, 32, 32), "depth": (1, 1, 1, 1), "num_classes": 5}, (2, 3, 224, 224)),
    "scalable_vit": (
        {"num_classes": 5, **_STAGES, "reduction_factor": (8, 4, 2, 1), "window_size": (8, 8, None, None)},
        (2, 3, 256, 256),
    ),
    "sep_vit": ({"num_classes": 5, **_STAGES, "window_size": 7}, (2, 3, 224, 224)),
    "simple_vit_1d": ({**SIZES}, (2, 3, 32)),
    "vit_1d": ({**SIZES}, (2, 3, 32)),
    "t2t": (
        {"image_size": 32, "num_classes": 5, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 64, "t2t_layers": ((7, 4),)},
        IMAGE,
    ),
    "twins_svt": (
        {
            "num_classes": 5, "s1_emb_dim": 16, "s2_emb_dim": 16, "s3_emb_dim": 32, "s4_emb_dim": 32, "s1_depth": 1,
            "s2_depth": 1, "s3_depth": 1, "s4_depth": 1, "s1_local_patch_size": 4, "s2_local_patch_size": 4,
            "s3_local_patch_size": 2, "s4_local_patch_size": 1, "s1_global_k": 4, "s2_global_k": 4, "s3_global_k": 2,
            "s4_global_k": 1,
        },
        (2, 3, 64, 64),
    ),
}  # fmt: skip
_NO_MODELS = set(
    "accept_video_wrapper dino distill es_vit extractor lejepa levjepa levjepa_nd mae mpp recorder simmim "
    "vit_nd_masking vaat vat vat_siglip efficient".split()
)
"""Wrappers, losses and models around models of one's own."""


def vit_pytorch_subjects() -> Iterator[tuple[str, Any]]:
    """The last class of each module that takes sizes."""
    import vit_pytorch

    for info in pkgutil.iter_modules(vit_pytorch.__path__):
        if info.name not in _NO_MODELS:
            yield info.name, lambda name=info.name: _vit_pytorch(name)


def _vit_pytorch(name: str) -> Subject:
    try:
        module = importlib.import_module(f"vit_pytorch.{name}")
    except ImportError as error:
        raise NotBuilt(f"ImportError: {error}") from error
    own = [c for c in vars(module).values() if inspect.isclass(c) and issubclass(c, nn.Module)]
    own = [c for c in own if c.__module__ == module.__name__]
    own = [
        c for c in own if "num_classes" in inspect.signature(c).parameters or name in VIT_PYTORCH
    ]
    if not own:
        raise NotBuilt("it has no model")
    cls = own[-1]
    torch.manual_seed(0)
    if name in VIT_PYTORCH:
        arguments, shape = VIT_PYTORCH[name]
        if name in ("pit", "simple_vit_1d", "vit_1d"):
            arguments = {
                k: v for k, v in arguments.items() if k in inspect.signature(cls).parameters
            }
        batch: Any = torch.randn(shape)
    else:
        arguments = sized(cls)
        video = "frames" in arguments or "max_frames" in arguments
        batch = torch.randn(2, 3, 4, 32, 32) if video else torch.randn(IMAGE)
    if name.startswith("na_vit"):
        batch = [torch.randn(3, 32, 32), torch.randn(3, 16, 32)]
        batch = [batch] if name == "na_vit" else batch
        batch = (
            [torch.randn(3, 4, 32, 32), torch.randn(3, 4, 16, 32)] if name.endswith("3d") else batch
        )
    return built(f"vit-pytorch {name}", lambda: cls(**arguments), {first_argument(cls): batch})


def sized(cls: Any) -> dict[str, Any]:
    """Small values for the arguments whose names say what they are."""
    return {n: SIZES[n] for n in inspect.signature(cls).parameters if n in SIZES}


def first_argument(cls: Any) -> str:
    return next(n for n in inspect.signature(cls.forward).parameters if n != "self")


def built(name: str, make: Callable[[], nn.Module], inputs: dict[str, Any]) -> Subject:
    """Make a model and try its batch."""
    torch.manual_seed(0)
    try:
        model = settle(make())
        with torch.no_grad():
            pass
        outputs_of(model(**inputs))
    except NotBuilt:
        raise
    except Exception as error:
        raise NotBuilt(f"{type(error).__name__}: {str(error)[:160]}") from error
    return Subject(name, model, inputs)


# --- x-transformers

_DECODER: list[dict[str, Any]] = [
    {}, {"attn_flash": True}, {"attn_num_mem_kv": 4}, {"use_rmsnorm": True}, {"use_simple_rmsnorm": True},
    {"ff_glu": True}, {"ff_swish": True, "ff_glu": True}, {"ff_relu_squared": True}, {"ff_no_bias": True},
    {"attn_pre_talking_heads": True}, {"attn_post_talking_heads": True},
    {"attn_kv_heads": 2}, {"attn_one_kv_head": True}, {"attn_qk_norm": True},
    {"attn_sparse_topk": 4}, {"attn_on_attn": True}, {"attn_gate_values": True}, {"attn_head_scale": True},
    {"rotary_pos_emb": True}, {"rotary_xpos": True}, {"alibi_pos_bias": True}, {"rel_pos_bias": True},
    {"dynamic_pos_bias": True}, {"sandwich_norm": True}, {"pre_norm": False},
    {"gate_residual": True}, {"scale_residual": True}, {"residual_attn": True}, {"shift_tokens": 1},
    {"macaron": True}, {"ff_post_act_ln": True}, {"attn_add_zero_kv": True}, {"attn_value_rmsnorm": True},
    {"layer_dropout": 0.0, "weight_tie_layers": True}, {"cross_attend": True}, {"sandwich_coef": 1},
    {"attn_laser": True}, {"attn_softclamp_logits": True},
    {"attn_hybrid_module": None}, {"add_value_residual": True}, {"num_residual_streams": 2}, {"use_layerscale": True},
    {"softclamp_output": True}, {"attn_gate_value_heads": True}, {"attn_orthog_projected_values": True},
]  # fmt: skip


def x_transformers_subjects() -> Iterator[tuple[str, Any]]:
    """Decoders and encoders with one option each, an encoder-decoder, and wrappers of vectors and images."""
    for options in _DECODER:
        label = "_".join(f"{k}={v}" for k, v in options.items()) or "plain"
        yield f"decoder_{label}", lambda options=options: _x_text("Decoder", options)
    for options in (
        {},
        {"attn_flash": True},
        {"ff_glu": True},
        {"rotary_pos_emb": True},
        {"attn_num_mem_kv": 4},
    ):
        label = "_".join(f"{k}={v}" for k, v in options.items()) or "plain"
        yield f"encoder_{label}", lambda options=options: _x_text("Encoder", options)
    yield "prefix_decoder", lambda: _x_text("PrefixDecoder", {})
    yield "vision", _x_vision
    yield "continuous", _x_continuous
    yield "encoder_decoder", _x_encoder_decoder
    yield "memory_tokens", lambda: _x_text("Encoder", {}, num_memory_tokens=3)


def _x_text(kind: str, options: dict[str, Any], **wrapper: Any) -> Subject:
    import x_transformers as x

    layers = getattr(x, kind, None) or getattr(
        importlib.import_module("x_transformers.x_transformers"), kind
    )
    torch.manual_seed(0)
    inputs: dict[str, Any] = {"x": torch.randint(1, 50, (2, 10))}
    if kind == "Encoder":
        mask = torch.ones(2, 10, dtype=torch.bool)
        mask[1, 7:] = False
        inputs["mask"] = mask
    if options.get("cross_attend"):
        inputs["context"] = torch.randn(2, 6, 32)

    def make() -> nn.Module:
        attention = layers(dim=32, depth=2, heads=4, attn_dim_head=8, **options)
        for module in attention.modules():
            if (
                type(module).__name__ == "LayerScale"
            ):  # its scale starts at 0 = offset 1 + parameter -1
                nn.init.normal_(module.gamma)  # type: ignore[arg-type]
        return x.TransformerWrapper(num_tokens=50, max_seq_len=32, attn_layers=attention, **wrapper)

    return built(f"x-transformers {kind} {options}", make, inputs)


def _x_vision() -> Subject:
    import x_transformers as x

    layers = lambda: x.Encoder(dim=32, depth=2, heads=4, attn_dim_head=8)  # noqa: E731
    make = lambda: x.ViTransformerWrapper(  # noqa: E731
        image_size=32, patch_size=8, num_classes=5, attn_layers=layers()
    )
    return built("x-transformers ViT", make, {"img": torch.randn(IMAGE)})


def _x_continuous() -> Subject:
    import x_transformers as x

    layers = lambda: x.Decoder(dim=32, depth=2, heads=4, attn_dim_head=8)  # noqa: E731
    make = lambda: x.ContinuousTransformerWrapper(  # noqa: E731
        dim_in=6, dim_out=6, max_seq_len=32, attn_layers=layers()
    )
    return built("x-transformers continuous", make, {"x": torch.randn(2, 10, 6)})


def _x_encoder_decoder() -> Subject:
    import x_transformers as x

    sizes = {"num_tokens": 50, "depth": 2, "heads": 4, "max_seq_len": 32, "attn_dim_head": 8}
    parts = {f"{side}_{k}": v for side in ("enc", "dec") for k, v in sizes.items()}
    inputs = {"src": torch.randint(1, 50, (2, 10)), "tgt": torch.randint(1, 50, (2, 7))}
    return built("x-transformers encoder-decoder", lambda: x.XTransformer(dim=32, **parts), inputs)


# --- open_clip

_TEXT = {"context_length": 12, "vocab_size": 64, "width": 32, "heads": 4, "layers": 2}
_VISION = {"image_size": 32, "layers": 2, "width": 32, "head_width": 8, "patch_size": 8}
_MULTI = {**_TEXT, "dim_head": 8, "n_queries": 5, "attn_pooler_heads": 4}
OPEN_CLIP: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "clip_vit": ("CLIP", _VISION, _TEXT),
    "clip_resnet": ("CLIP", {**_VISION, "layers": [1, 1, 1, 1], "width": 16, "image_size": 64}, _TEXT),
    "clip_attentional_pool": ("CLIP", {**_VISION, "attentional_pool": True, "attn_pooler_queries": 6,
                                       "attn_pooler_heads": 4}, _TEXT),
    "clip_layer_scale": ("CLIP", {**_VISION, "ls_init_value": 0.5}, {**_TEXT, "ls_init_value": 0.5}),
    "clip_no_causal": ("CustomTextCLIP", _VISION, {**_TEXT, "no_causal_mask": True, "pool_type": "last"}),
    "custom_text": ("CustomTextCLIP", _VISION, {**_TEXT, "embed_cls": True, "pad_id": 0}),
    "timm_tower": ("CLIP", {"timm_model_name": "test_vit", "timm_model_pretrained": False, "timm_pool": "",
                            "timm_proj": "linear", "image_size": 160}, _TEXT),
    "siglip_like": ("CustomTextCLIP", {"timm_model_name": "test_vit", "timm_model_pretrained": False,
                                       "timm_pool": "map", "timm_proj": "none", "image_size": 160},
                    {**_TEXT, "no_causal_mask": True, "proj_bias": True, "pool_type": "last"}),
    "coca": ("CoCa", {**_VISION, "attentional_pool": True, "attn_pooler_heads": 4, "output_tokens": True},
             {**_TEXT, "embed_cls": True, "output_tokens": True}),
}  # fmt: skip


def open_clip_subjects() -> Iterator[tuple[str, Any]]:
    """The kinds of towers that open_clip has."""
    for name in OPEN_CLIP:
        yield name, lambda name=name: _open_clip(name)


def _open_clip(name: str) -> Subject:
    import open_clip.coca_model as coca
    import open_clip.model as models

    kind, vision, text = OPEN_CLIP[name]
    width = 64 if name == "siglip_like" else 32
    side = vision["image_size"]
    inputs: dict[str, Any] = {
        "image": torch.randn(2, 3, side, side),
        "text": torch.randint(1, 60, (2, 12)),
    }
    if kind == "CoCa":
        return built(
            f"open_clip {name}",
            lambda: coca.CoCa(
                embed_dim=width, multimodal_cfg=_MULTI, text_cfg=text, vision_cfg=vision
            ),
            inputs,
        )
    return built(
        f"open_clip {name}",
        lambda: getattr(models, kind)(embed_dim=width, vision_cfg=vision, text_cfg=text),
        inputs,
    )


# --- torchtune

_LM = {
    "vocab_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 32,
    "max_seq_len": 32,
}
TORCHTUNE: dict[str, dict[str, Any]] = {
    "llama2": {**_LM, "intermediate_dim": 64},
    "llama3": {**_LM, "intermediate_dim": 64},
    "llama3_1": {**_LM, "intermediate_dim": 64},
    "llama3_2": {**_LM, "intermediate_dim": 64},
    "mistral": {**_LM, "intermediate_dim": 64},
    "phi3": {**_LM, "intermediate_dim": 64},
    "qwen2": {**_LM, "intermediate_dim": 64},
    "gemma": {**_LM, "intermediate_dim": 64, "head_dim": 8},
    "gemma2": {**_LM, "intermediate_dim": 64, "head_dim": 8, "sliding_window_size": 4,
               "hidden_capping_value": 50.0, "final_capping_value": 30.0},
}  # fmt: skip


def torchtune_subjects() -> Iterator[tuple[str, Any]]:
    """Decoders by their builders, with LoRA too, and the towers for images and text."""
    for name, sizes in TORCHTUNE.items():
        yield name, lambda name=name, sizes=sizes: _torchtune(name, name, sizes)
        lora = {**sizes, "lora_attn_modules": ["q_proj", "v_proj"], "apply_lora_to_mlp": True, "lora_rank": 4,
                "lora_alpha": 8}  # fmt: skip
        yield f"lora_{name}", lambda name=name, lora=lora: _torchtune(name, f"lora_{name}", lora)
    yield "clip_vision", _torchtune_vision
    yield "t5_encoder", _torchtune_t5


def _torchtune(package: str, builder: str, sizes: dict[str, Any]) -> Subject:
    module = importlib.import_module(f"torchtune.models.{package}")
    inner = importlib.import_module(f"torchtune.models.{package}._component_builders")
    make = getattr(module, builder, None) or getattr(inner, builder, None)
    if make is None:
        raise NotBuilt("it has no such builder")
    accepted = inspect.signature(make).parameters
    sizes = {k: v for k, v in sizes.items() if k in accepted}
    return built(
        f"torchtune {builder}", lambda: make(**sizes), {"tokens": torch.randint(1, 60, (2, 10))}
    )


def _torchtune_vision() -> Subject:
    from torchtune.models.clip import clip_vision_encoder

    def make() -> nn.Module:
        return clip_vision_encoder(
            tile_size=32,
            patch_size=8,
            embed_dim=32,
            num_layers=2,
            num_heads=4,
            max_num_tiles=1,
            out_indices=None,
        )

    inputs: dict[str, Tensor] = {
        "images": torch.randn(2, 1, 1, 3, 32, 32),
        "aspect_ratio": torch.ones(2, 1, 2, dtype=torch.long),
    }
    return built("torchtune clip_vision", make, inputs)


def _torchtune_t5() -> Subject:
    from torchtune.models.t5._component_builders import t5_encoder

    def make() -> nn.Module:
        return t5_encoder(
            embed_dim=32, mlp_dim=64, num_heads=4, head_dim=8, num_layers=2, rel_pos_num_buckets=8,
            rel_pos_max_dist=16, vocab_size=64, norm_eps=1e-6, max_seq_len=10,
        )  # fmt: skip

    return built("torchtune t5_encoder", make, {"tokens": torch.randint(1, 60, (2, 10))})
