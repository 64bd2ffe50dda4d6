"""Small random models of every timm module and transformers family that can be built here, with a batch each."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
import transformers
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING

LARGEST = 40_000_000  # parameters; what is larger is not built here
_SMALL_NAMES = (
    "test_ nano pico atto femto zepto xxs xx_small _b0 tiny _t xs mini s0 small _s".split()
)


class NotBuilt(Exception):
    """A model that cannot be built or run here by itself, and why."""


@dataclass
class Subject:
    """A model and a batch on which its plain training forward works."""

    name: str
    model: nn.Module
    inputs: dict[str, Any]


def outputs_of(out: Any) -> Tensor:
    """Every floating tensor of a model's output that depends on its parameters, in one."""
    values = out.to_tuple() if hasattr(out, "to_tuple") else out
    found = [
        t for t in pytree.tree_leaves(values) if isinstance(t, Tensor) and t.is_floating_point()
    ]
    found = [t for t in found if t.requires_grad]
    if not found:
        raise NotBuilt("its output holds no tensor with a gradient")
    return torch.cat([t.float().flatten() for t in found])


def settle(model: nn.Module) -> nn.Module:
    """No randomness of its own, and no parameter so small that its branch counts nothing (LayerScale, zero norms)."""
    for module in model.modules():
        if isinstance(module, nn.Dropout | nn.Dropout1d | nn.Dropout2d):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and (
                "drop" in name or name in ("layerdrop", "mask_time_prob")
            ):
                setattr(module, name, 0.0)
    for config in {
        id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None
    }.values():
        for name, value in list(vars(config).items()):
            if isinstance(value, float) and ("drop" in name or name.startswith("mask_")):
                setattr(config, name, 0.0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.numel() and parameter.abs().max() < 1e-2:
                parameter.normal_(0.0, 0.1)
    return model.train()


# --- timm


def timm_subjects() -> Iterator[tuple[str, Any]]:
    """Each module of timm with a function that builds its smallest model."""
    for module in timm.list_modules():
        yield module, lambda module=module: _timm_subject(module)


def _timm_subject(module: str) -> Subject:
    names = timm.list_models(module=module)
    if not names:
        raise NotBuilt("it has no models of its own")
    rank = {n: next((i for i, part in enumerate(_SMALL_NAMES) if part in n), 99) for n in names}
    said = ""
    for name in sorted(names, key=lambda n: (rank[n], len(n)))[:8]:
        for size in (64, 128, 224, 256):
            for given in ({"img_size": size, "depth": 2}, {"img_size": size}, {"depth": 2}, {}):
                try:
                    return _timm_built(module, name, size, given)
                except NotBuilt as error:
                    said = str(error)
                except TimeoutError:
                    raise
                except Exception as error:
                    said = said or f"{type(error).__name__}: {str(error)[:100]}"
    raise NotBuilt(said)


def _timm_built(module: str, name: str, size: int, given: dict[str, Any]) -> Subject:
    with torch.device("meta"):
        if sum(p.numel() for p in timm.create_model(name, **given).parameters()) > LARGEST:
            raise NotBuilt(f"{name} has more than {LARGEST:,} parameters")
    torch.manual_seed(0)
    model = settle(timm.create_model(name, num_classes=5, **given))
    whole = model.default_cfg.get("input_size", (3, size, size))
    side = size if "img_size" in given else min(size, whole[-1])
    first = next(iter(inspect.signature(model.forward).parameters))
    inputs = {first: torch.randn(2, whole[0], side, side)}
    outputs_of(model(**inputs))
    return Subject(f"timm {module} ({name}, {side} px)", model, inputs)


# --- transformers

_SIZES: dict[str, Any] = {}
for _names, _value in {
    "hidden_size d_model n_embd embed_dim hidden_dim encoder_hidden_size word_embed_proj_dim embedding_size": 32,
    "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
    "num_decoder_layers encoder_num_layers decoder_num_layers": 2,
    "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads": 4,
    "num_key_value_heads num_kv_heads": 2,
    "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner d_inner moe_intermediate_size "
    "shared_expert_intermediate_size feed_forward_size dim_feedforward": 64,
    "head_dim d_kv attention_head_size": 8,
    "vocab_size text_vocab_size": 64, "image_size": 64, "patch_size": 8,
    "num_experts num_local_experts n_routed_experts": 4,
    "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "use_timm_backbone": False, "use_pretrained_backbone": False, "layerdrop": 0.0, "num_feature_levels": 1,
    "sliding_window": 4, "attention_window": 4, "num_queries": 5, "projection_dim": 32, "max_position_embeddings": 64,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "max_source_positions": 50,
    "attn_layer_period expert_layer_period full_attention_interval": 2, "attn_layer_offset expert_layer_offset": 1,
    "rotary_dim": 4, "first_k_dense_replace": 1, "mamba_n_heads mamba_num_heads linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim": 8,
    "n_group": 1, "topk_group": 1, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
}.items():  # fmt: skip
    _SIZES |= dict.fromkeys(_names.split(), _value)


_OWN_SIZES = {"mobilevit": {"image_size": 256}, "mobilevitv2": {"image_size": 256}}


def transformers_subjects() -> Iterator[tuple[str, Any]]:
    """Each family of transformers with a base model, with a function that builds a tiny one."""
    table = read_table("transformers")
    for kind, config in CONFIG_MAPPING.items():
        if config in MODEL_MAPPING:
            yield (
                kind,
                lambda kind=kind, config=config: _transformers_subject(
                    kind, config, table.get(kind)
                ),
            )


def _transformers_subject(kind: str, config_class: Any, entry: dict[str, Any] | None) -> Subject:
    """From the table where it has the family and still fits, else from the names of sizes."""
    said = ""
    if entry is not None:
        try:
            return _from_tester(kind, config_class, entry)
        except (TimeoutError, MemoryError):
            raise
        except Exception as error:
            said = f" (its tester's configuration: {type(error).__name__}: {str(error)[:80]})"
    try:
        return _from_sizes(kind, config_class)
    except NotBuilt as error:
        raise NotBuilt(f"{error}{said}") from error


def _from_tester(kind: str, config_class: Any, entry: dict[str, Any]) -> Subject:
    config = config_class.from_dict(entry["config"])
    torch.manual_seed(0)
    model = settle(getattr(transformers, entry["model"])(config))
    if sum(p.numel() for p in model.parameters()) > LARGEST:
        raise NotBuilt("too large")
    accepted = inspect.signature(model.forward).parameters
    inputs = {k: tensors(v) for k, v in entry["inputs"].items() if k in accepted and v is not None}
    if "use_cache" in accepted:
        inputs["use_cache"] = False
    if (
        isinstance(mask := inputs.get("attention_mask"), Tensor)
        and mask.ndim == 2
        and bool((mask == 1).all())
    ):
        mask[-1, -2:] = 0  # the testers seldom pad
    outputs_of(model(**inputs))
    return Subject(f"transformers {kind} ({entry['model']})", model, inputs)


def read_table(library: str) -> dict[str, Any]:
    """The configurations of a library's own tests (`benchmarks.tester_configs`)."""
    path = Path(__file__).parent / f"tiny_{library}.json"
    table: dict[str, Any] = json.loads(path.read_text())
    return table


def tensors(spec: Any, generator: torch.Generator | None = None) -> Any:
    """The input that an entry of a table stands for."""
    generator = generator or torch.Generator().manual_seed(0)
    if isinstance(spec, list):
        return [tensors(s, generator) for s in spec]
    if not isinstance(spec, dict):
        return spec
    if "dict" in spec:
        return {k: tensors(v, generator) for k, v in spec["dict"].items()}
    if "values" in spec:
        return torch.tensor(spec["values"], dtype=getattr(torch, spec["dtype"]))
    if "high" in spec:
        return torch.randint(0, spec["high"], spec["shape"], generator=generator).to(
            getattr(torch, spec["dtype"])
        )
    return torch.randn(spec["shape"], generator=generator) * 0.5 + spec["mean"]


def diffusers_subjects() -> Iterator[tuple[str, Any]]:
    """Each model of diffusers whose tests say how it is made."""
    for name, entry in read_table("diffusers").items():
        yield name, lambda name=name, entry=entry: _diffusers_subject(name, entry)


def _diffusers_subject(name: str, entry: dict[str, Any]) -> Subject:
    import diffusers

    cls = getattr(diffusers, name, None)
    if cls is None:
        raise NotBuilt("this version of diffusers does not have it")
    try:
        torch.manual_seed(0)
        model = settle(cls(**entry["config"]))
        if sum(p.numel() for p in model.parameters()) > LARGEST:
            raise NotBuilt("too large")
        accepted = inspect.signature(model.forward).parameters
        inputs = {
            k: tensors(v) for k, v in entry["inputs"].items() if k in accepted and v is not None
        }
        outputs_of(model(**inputs))
    except (NotBuilt, TimeoutError, MemoryError):
        raise
    except Exception as error:
        raise NotBuilt(f"{type(error).__name__}: {str(error)[:100]}") from error
    return Subject(f"diffusers {name}", model, inputs)


def _tiny_config(cls: Any, depth: int = 0) -> Any:
    names = inspect.signature(cls.__init__).parameters
    sizes = _SIZES | _OWN_SIZES.get(getattr(cls, "model_type", ""), {})
    given: dict[str, Any] = {n: v for n, v in sizes.items() if n in names}
    if isinstance(names.get("patch_size"), inspect.Parameter) and isinstance(
        names["patch_size"].default, list | tuple
    ):
        given.pop("patch_size")
    for name, parameter in names.items():
        default = parameter.default
        if name in ("depths", "layers_per_stage") and isinstance(default, list | tuple):
            given[name] = [1] * len(default)
    for name, sub in (getattr(cls, "sub_configs", None) or {}).items():
        if (
            depth < 3
            and sub.__name__ not in ("AutoConfig", "PretrainedConfig", "PreTrainedConfig")
            and name in names
        ):
            given[name] = _tiny_config(sub, depth + 1).to_dict()
    given |= _layer_kinds(cls, names)
    while True:
        try:
            return cls(**given)
        except Exception as error:
            culprit = next(
                (n for n in given if n in str(error)), None
            )  # a family's own rule: leave its default
            if culprit is None:
                raise NotBuilt(
                    f"no tiny configuration: {type(error).__name__}: {str(error)[:100]}"
                ) from error
            given.pop(culprit)


def _layer_kinds(cls: Any, names: Any) -> dict[str, Any]:
    """As many layers as a family has kinds of them, one of each, where its configuration names the kinds."""
    try:
        kinds = list(dict.fromkeys(getattr(cls(), "layer_types", None) or ()))
    except Exception:  # a configuration that has no default
        return {}
    if "layer_types" not in names or len(kinds) < 2:
        return {}
    return {"layer_types": kinds, "num_hidden_layers": len(kinds)}


def _from_sizes(kind: str, config_class: Any) -> Subject:
    config = _tiny_config(config_class)
    cls: Any = MODEL_MAPPING[config_class]
    cls = cls[0] if isinstance(cls, tuple) else cls
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in cls(config).parameters())
        if size > LARGEST:
            raise NotBuilt(f"{size:,} parameters, more than {LARGEST:,}")
        torch.manual_seed(0)
        model = settle(cls(config))
    except NotBuilt:
        raise
    except Exception as error:
        raise NotBuilt(f"{type(error).__name__}: {str(error)[:100]}") from error
    said = ""
    for inputs in _batches(model, config):
        try:
            outputs_of(model(**inputs))
        except Exception as error:
            said = said or f"{type(error).__name__}: {str(error)[:100]}"
            continue
        return Subject(f"transformers {kind}", model, inputs)
    raise NotBuilt(f"no batch that it takes: {said}")


def _batches(model: nn.Module, config: Any) -> Iterator[dict[str, Any]]:
    names = inspect.signature(model.forward).parameters
    cache = {"use_cache": False} if "use_cache" in names else {}
    parts = [
        config,
        *(getattr(config, n, None) for n in ("text_config", "vision_config", "audio_config")),
    ]

    def of(name: str, default: Any) -> Any:
        return next((v for c in parts if (v := getattr(c, name, None)) is not None), default)

    side = of("image_size", 64)
    side = side[0] if isinstance(side, list | tuple) else side
    channels, mel = of("num_channels", 3), of("num_mel_bins", of("input_feat_per_channel", 80))
    text = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 6:] = 0
    images = {"pixel_values": torch.randn(2, channels, side, side)}
    for padding in ({"attention_mask": mask}, {}):
        words = {"input_ids": text, **(padding if "attention_mask" in names else {}), **cache}
        if "bbox" in names:
            words["bbox"] = torch.zeros(2, 8, 4, dtype=torch.long)
        decoder = {"decoder_input_ids": text[:, :7]} if "decoder_input_ids" in names else {}
        if "input_ids" in names and "pixel_values" in names:
            yield {**words, **images}
        if "input_ids" in names:
            yield {**words, **decoder}
            yield dict(words)
        if "pixel_values" in names:
            yield {**images, **decoder, **cache}
    for size in (64, 96, 128, 224):
        if "pixel_values" in names:
            yield {"pixel_values": torch.randn(2, channels, size, size)}
            yield {"pixel_values": torch.randn(2, of("num_frames", 4), channels, size, size)}
    decoder = {"decoder_input_ids": text} if "decoder_input_ids" in names else {}
    for length in (1600, 16000):
        if "input_values" in names:
            yield {"input_values": torch.randn(2, length), **decoder}
    if "input_values" in names:
        yield {"input_values": torch.randn(2, of("max_length", 64), mel)}
    for shape in ((2, mel, 100), (2, 100, mel), (2, mel, 3000)):
        if "input_features" in names:
            yield {"input_features": torch.randn(*shape), **decoder, **cache}
