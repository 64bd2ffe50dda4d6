"""Which linear layer of a block does what: q, k, v, a fused qkv or kv, the output, and the
feed-forward's two layers.

Low-rank adapters (peft's LoRA) lie beside a linear layer: they are found here too,
and read at each forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dampen.functional.explicit.layers import LowRank
from dampen.regularizer import ADAPTERS, UnsupportedModel

_NAMES = {
    "q": "q_proj query q to_q wq query_proj q_lin linear_q "
    "q_attn c_q q_linear Wq project_q W_q w_q "
    "q_b_proj q_head projection_query fc_q W_query w_qs "
    "queries toqueries to_queries query_projection "
    "linear_query query_layer query_linear",
    "k": "k_proj key k to_k wk key_proj k_lin linear_k c_k k_linear Wk "
    "project_k W_k w_k k_head projection_key "
    "fc_k W_key w_ks keys tokeys to_keys key_projection linear_key key_layer key_linear",
    "v": "v_proj value v to_v wv value_proj v_lin linear_v c_v v_linear Wv "
    "project_v W_v w_v v_head projection_value "
    "fc_v W_value w_vs values tovalues to_values "
    "value_projection linear_value value_layer value_linear",
    "qkv": "qkv query_key_value in_proj c_attn wqkv Wqkv qkv_proj to_qkv qkvs pwise",
    "kv": "kv kv_proj to_kv c_kv kv_b_proj",
    "out": "proj out_proj o_proj c_proj to_out dense o wo out out_lin "
    "o_linear attention_out W_o w_o W_out post_proj "
    "fc_o out_projection unifyheads",
}
ATTENTION_ROLES = {name: role for role, names in _NAMES.items() for name in names.split()}
_FFN_NAMES = {
    "ffn_in": "fc1 linear1 lin1 wi wi_0 wi_1 up_proj gate_proj "
    "gate_up_proj c_fc intermediate intermediate_dense "
    "dense_h_to_4h fc_in fc1_g fc1_x w12 w_in linear_fc1 ffn",
    "ffn_out": "fc2 linear2 lin2 wo down_proj c_proj output output_dense "
    "dense_4h_to_h fc_out ffn_output linear_fc2 "
    "w_out",
}
FFN_IN, FFN_OUT = (set(names.split()) for names in _FFN_NAMES.values())
_NOT_FFN = (
    "modulation",
    "adaln",
    "router",
    "gate",
    "time",
    "cond",
    "norm",
    "pos",
    "adapter",
    "lora",
)


def is_linear(module: nn.Module) -> bool:
    """An `nn.Linear`, the transposed Conv1D of Hugging Face's GPT-2, or torchtune's linear layer
    with an adapter."""
    return isinstance(module, nn.Linear) or is_conv1d(module) or is_low_rank(module)


def is_convolution(module: nn.Module | None) -> bool:
    """A convolution that is a linear map at every position: one position wide, and one step."""
    return (
        isinstance(module, nn.Conv1d | nn.Conv2d)
        and all(n == 1 for n in (*module.kernel_size, *module.stride))
        and not any(module.padding if isinstance(module.padding, tuple) else ())
    )


def is_low_rank(module: nn.Module) -> bool:
    """A linear layer that holds its low-rank adapter and adds it itself, W + s B A (torchtune's
    LoRALinear)."""
    weight = vars(module)["_parameters"].get("weight")
    return (
        weight is not None
        and weight.ndim == 2
        and all(isinstance(getattr(module, n, None), nn.Linear) for n in ("lora_a", "lora_b"))
        and all(hasattr(module, n) for n in ("alpha", "rank"))
    )


def linear_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The linear layers of a module by name, without those that an adapter consists of."""
    adapted = [n + "." for n, m in module.named_modules() if is_low_rank(m)]
    for name, inner in module.named_modules():
        if is_linear(inner) and not name.startswith(tuple(adapted)):
            yield name, inner


def is_conv1d(module: nn.Module) -> bool:
    """transformers.pytorch_utils.Conv1D, found without importing transformers."""
    return any(
        c.__name__ == "Conv1D" and c.__module__ == "transformers.pytorch_utils"
        for c in type(module).__mro__
    )


def kind_of(module: nn.Module) -> str:
    """Which of the four a linear layer is: looked up once, when it is opened, and
    not in every forward."""
    kinds = {"convolution": is_convolution, "conv1d": is_conv1d, "low rank": is_low_rank}
    return next((kind for kind, fits in kinds.items() if fits(module)), "linear")


def weight_of(module: nn.Module, kind: str = "") -> Tensor:
    """The weight of a linear map as (out, in)."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    kind = kind or kind_of(module)
    if kind == "conv1d":
        return weight.t()
    if kind == "low rank":
        return _merged(module, weight)
    if kind == "convolution":
        weight = weight.flatten(1)
        groups: int = module.groups  # type: ignore[assignment]
        return weight if groups == 1 else torch.block_diag(*weight.chunk(groups))
    return weight


def _merged(module: nn.Module, weight: Tensor) -> Tensor:
    """W + s B A, or W where the adapter is switched off or merged already."""
    lora: Any = module
    if not weight.is_floating_point() or lora.disabled or lora.merged:
        return weight
    adapter: Tensor = lora.lora_b.weight @ lora.lora_a.weight
    merged: Tensor = weight + lora.alpha / lora.rank * adapter
    return merged


def attention_role(name: str, siblings: Mapping[str, nn.Module]) -> str:
    """The role of a linear map inside an attention module, by the last meaningful part of its name;
    "other" if none has one.

    >>> attention_role("q_proj.base_layer", {}), attention_role("q_proj.lora_B.default", {})
    ('q', 'lora_q')
    """
    parts = name.split(".")
    for i, part in reversed(list(enumerate(parts))):
        if part in ATTENTION_ROLES:
            role = ATTENTION_ROLES[part]
            if role == "out":  # "q.proj" is the map of a module that makes the queries
                role = next(
                    (r for p in parts[:i] if (r := ATTENTION_ROLES.get(p, "out")) != "out"), role
                )
            role = (
                "kv" if part == "c_attn" and "q_attn" in siblings else role
            )  # GPT-2's cross-attention
            return f"lora_{role}" if is_adapter(name) else role
    return "other"


def is_adapter(name: str) -> bool:
    """Whether a map is one of the two that LoRA puts beside another (peft: lora_A, lora_B)."""
    return any(part.startswith("lora_") for part in name.split("."))


def adapter_side(name: str) -> str:
    """Which of LoRA's two maps a name says: "lora_a", which reads the input, or "lora_b"; else "".

    >>> adapter_side("q_proj.lora_A.default"), adapter_side("q_proj.base_layer")
    ('lora_a', '')
    """
    return next((side for part in name.split(".") if (side := part.lower()) in ADAPTERS), "")


def _feed_forward_role(parts: Sequence[str]) -> str:
    """What the last meaningful part of a name says: "ffn.lin2" is the second map. A part "ffn"
    counts only at the end (ALBERT), because elsewhere it holds both maps. A bottleneck around the
    layer is none of its maps (MobileBERT's "output.bottleneck.dense")."""
    if "bottleneck" in parts:
        return ""
    for i in range(len(parts) - 1, -1, -1):
        if parts[i] == "ffn" and i < len(parts) - 1:
            continue
        if (parts[i] in FFN_IN) != (parts[i] in FFN_OUT):
            return "ffn_in" if parts[i] in FFN_IN else "ffn_out"
    return ""


def _is_partner(name: str, other: str, maps: Mapping[str, nn.Module]) -> bool:
    """Whether two maps stand side by side and one leads back from where the other leads."""
    beside = name.rpartition(".")[0] == other.rpartition(".")[0]
    return (
        beside and tuple(weight_of(maps[name]).shape) == tuple(weight_of(maps[other]).shape)[::-1]
    )


def feed_forward_roles(maps: Mapping[str, nn.Module], by_shape: bool = True) -> dict[str, str]:
    """The roles of a block's linear maps outside attention: ffn_in, ffn_out or other. `by_shape`:
    where no name shows it, the shapes do.

    >>> maps = {"mlp.gate_proj": nn.Linear(4, 8), "mlp.up_proj": nn.Linear(4, 8), "mlp.down_proj": nn.Linear(8, 4)}
    >>> list(feed_forward_roles(maps).values())
    ['ffn_in', 'ffn_in', 'ffn_out']
    """
    roles = dict.fromkeys(maps, "other")
    rest = []
    for name in maps:
        parts = name.split(".")
        telling = _feed_forward_role(parts)
        if telling:
            roles[name] = f"lora_{telling}" if is_adapter(name) else telling
        elif not any(word in part.lower() for part in parts for word in _NOT_FFN):
            rest.append(name)
    alone = [name for name in maps if roles[name] in ("ffn_in", "ffn_out")]
    pair = next((n for n in rest if len(alone) == 1 and _is_partner(n, alone[0], maps)), None)
    if (
        pair is not None
    ):  # a name that fits one map of two says nothing: "linear0" and "linear1" (FT-Transformer)
        first, second = (n for n in maps if n in (pair, alone[0]))
        roles |= {first: "ffn_in", second: "ffn_out"}
    if (
        by_shape
        and rest
        and "ffn_in" not in roles.values()
        and "ffn_out" not in roles.values()
        and len(rest) > 1
    ):
        shapes = {name: tuple(weight_of(maps[name]).shape) for name in rest}
        # in pairs: another one beside it leads back from where it leads
        places = {(name.rpartition(".")[0], shape) for name, shape in shapes.items()}
        pairs = {
            name
            for name, shape in shapes.items()
            if shape != shape[::-1] and (name.rpartition(".")[0], shape[::-1]) in places
        }
        if pairs and rest[0] not in pairs and not _is_beside_any(rest[0], pairs, maps):
            # what joins two streams is in no pair (U-ViT)
            rest = [n for n in rest if n in pairs or _is_beside_any(n, pairs, maps)]
        width = shapes[rest[0]][1]  # the first map reads the tokens
        narrowing = [name for name in rest if shapes[name][0] == width and shapes[name][1] != width]
        for name in rest:
            roles[name] = "ffn_out" if name in (narrowing or rest[-1:]) else "ffn_in"
    for name in (
        n for n, role in roles.items() if role == "other" and n.rpartition(".")[2] == "gate"
    ):
        if any(roles[n] == "ffn_in" and _is_beside(n, name, maps) for n in maps):
            roles[name] = "ffn_in"  # of SwiGLU; a router is not as wide
    return roles


def _is_beside_any(name: str, others: Iterable[str], maps: Mapping[str, nn.Module]) -> bool:
    return any(_is_beside(name, other, maps) for other in others)


def _is_beside(name: str, other: str, maps: Mapping[str, nn.Module]) -> bool:
    """Whether two maps stand side by side and are of one shape."""
    beside = name.rpartition(".")[0] == other.rpartition(".")[0]
    return beside and weight_of(maps[name]).shape == weight_of(maps[other]).shape


# --- low-rank adapters


def is_lora(module: nn.Module) -> bool:
    """Whether a module is a LoRA layer as peft makes them: y = base_layer(x) + s B A x."""
    return all(
        hasattr(module, name)
        for name in ("base_layer", "lora_A", "lora_B", "scaling", "active_adapters")
    )


def connect_adapters(model: nn.Module) -> int:
    """Give each regularized map the adapter around it; how many have one."""
    count = 0
    for module in model.modules():
        if is_lora(module):
            site = vars(module.base_layer).get("_dampen_linear")
            if site is not None:
                site.adapter = module
                count += 1
    return count


def read_adapter(lora: Any, where: str) -> LowRank | None:
    """The adapters at work in this forward; None where they are switched off, or
    merged into the weight."""
    if lora.disable_adapters or lora.merged:
        return None
    names = [n for n in lora.active_adapters if n in lora.lora_A]
    variant = next((n for n in names if n in getattr(lora, "lora_variant", {})), None)
    if variant is not None:
        raise UnsupportedModel(
            f"the adapter '{variant}' at '{where}' is no plain LoRA (DoRA or "
            "another variant), so W + s B A is not its "
            "map and the penalty would be of something else. Penalize "
            "maps without it, or leave the layer out."
        )
    if not names:
        return None
    return LowRank(
        tuple((lora.lora_A[n].weight, lora.lora_B[n].weight, float(lora.scaling[n])) for n in names)
    )
