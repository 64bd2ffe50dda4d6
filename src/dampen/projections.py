"""Which linear map of a block does what: q, k, v, a fused qkv or kv, the output, and the feed-forward's two layers.

Found by the usual names, then by shape, then by order; the user can say it instead (`regularize(...,
projections=...)`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from dampen.regularizer import Call, LinearCall

_NAMES = {
    "q": "q_proj query q to_q wq query_proj q_lin linear_q q_attn c_q q_linear",
    "k": "k_proj key k to_k wk key_proj k_lin linear_k c_k k_linear",
    "v": "v_proj value v to_v wv value_proj v_lin linear_v c_v v_linear",
    "qkv": "qkv in_proj c_attn wqkv Wqkv qkv_proj to_qkv",
    "kv": "kv kv_proj to_kv c_kv",
    "out": "proj out_proj o_proj c_proj to_out dense o wo out out_lin o_linear",
}
ATTENTION_ROLES = {name: role for role, names in _NAMES.items() for name in names.split()}
_FFN_NAMES = {
    "ffn_in": "fc1 linear1 lin1 wi wi_0 wi_1 up_proj gate_proj gate_up_proj c_fc intermediate intermediate_dense "
    "dense_h_to_4h fc_in fc1_g fc1_x w12 ffn",
    "ffn_out": "fc2 linear2 lin2 wo down_proj c_proj output output_dense dense_4h_to_h fc_out ffn_output",
}
_FFN_IN, _FFN_OUT = (set(names.split()) for names in _FFN_NAMES.values())
_NOT_FFN = ("modulation", "adaln", "router", "gate", "time", "cond", "norm", "pos", "adapter", "lora")


def is_linear(module: nn.Module) -> bool:
    """An `nn.Linear`, or the transposed Conv1D of Hugging Face's GPT-2."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """transformers.pytorch_utils.Conv1D, found without importing transformers."""
    return any(c.__name__ == "Conv1D" and c.__module__ == "transformers.pytorch_utils" for c in type(module).__mro__)


def weight_of(module: nn.Module) -> Tensor:
    """The weight of a linear map as (out, in)."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight.t() if is_conv1d(module) else weight


def attention_role(name: str, siblings: Mapping[str, nn.Module]) -> str:
    """The role of a linear map inside an attention module, by the last telling part of its name; "other" if none
    tells.

    >>> attention_role("q_proj.base_layer", {}), attention_role("q_proj.lora_B.default", {})
    ('q', 'lora_q')
    """
    for part in reversed(name.split(".")):
        if part in ATTENTION_ROLES:
            role = ATTENTION_ROLES[part]
            role = "kv" if part == "c_attn" and "q_attn" in siblings else role  # GPT-2's cross-attention
            return f"lora_{role}" if _is_adapter(name) else role
    return "other"


def _is_adapter(name: str) -> bool:
    """Whether a map is one of the two that LoRA puts beside another (peft: lora_A, lora_B)."""
    return any(part.startswith("lora_") for part in name.split("."))


def feed_forward_roles(maps: Mapping[str, nn.Module]) -> dict[str, str]:
    """The roles of a block's linear maps outside attention: ffn_in, ffn_out or other.

    >>> maps = {"mlp.gate_proj": nn.Linear(4, 8), "mlp.up_proj": nn.Linear(4, 8), "mlp.down_proj": nn.Linear(8, 4)}
    >>> list(feed_forward_roles(maps).values())
    ['ffn_in', 'ffn_in', 'ffn_out']
    """
    roles = dict.fromkeys(maps, "other")
    rest = []
    for name in maps:
        parts = name.split(".")
        known = {"ffn_in": _FFN_IN & set(parts), "ffn_out": _FFN_OUT & set(parts)}
        telling = [role for role, hits in known.items() if hits]
        if len(telling) == 1:
            roles[name] = f"lora_{telling[0]}" if _is_adapter(name) else telling[0]
        elif not any(word in part.lower() for part in parts for word in _NOT_FFN):
            rest.append(name)
    if rest and "ffn_in" not in roles.values() and "ffn_out" not in roles.values() and len(rest) > 1:
        shapes = {name: tuple(weight_of(maps[name]).shape) for name in rest}
        width = shapes[rest[0]][1]  # the first map reads the tokens
        narrowing = [name for name in rest if shapes[name][0] == width and shapes[name][1] != width]
        for name in rest:
            roles[name] = "ffn_out" if name in (narrowing or rest[-1:]) else "ffn_in"
    return roles


def split_projection(call: Call, role: str) -> LinearCall:
    """The linear map behind q, k or v of one attention call, cut out of a fused projection where it is fused."""
    if role in call.maps:
        return call.maps[role]
    fused = "qkv" if "qkv" in call.maps else "kv" if "kv" in call.maps and role != "q" else None
    if fused is None:
        found = ", ".join(sorted(call.maps)) or "none"
        where = call.site.name if call.site else "this attention"
        raise RuntimeError(
            f"{type(call.module).__name__} at '{where}': cannot tell which linear map makes {role} (roles found: "
            f"{found}). "
            f"Say it when regularizing: regularize(..., projections={{'q': 'name', 'k': 'name', 'v': 'name'}}) or "
            f"{{'qkv': 'name'}}, with names inside the attention module."
        )
    whole = call.maps[fused]
    rows = _fused_rows(call, whole, fused)
    start = {"q": 0, "k": rows["q"], "v": rows["q"] + rows["k"]}[role]
    cut = slice(start, start + rows[role])
    return dataclasses.replace(
        whole,
        role=role,
        weight=whole.weight[cut],
        bias=None if whole.bias is None else whole.bias[cut],
        output=None if whole.output is None else whole.output[..., cut],
    )


def _fused_rows(call: Call, whole: LinearCall, fused: str) -> dict[str, int]:
    """How many rows of a fused weight make q, k and v, from the number of query heads seen at the socket.

    The number of key heads follows from the weight, because some libraries repeat keys before they call the socket.
    """
    total, queries = whole.weight.shape[0], call.shape[1] * call.head_size if fused == "qkv" else 0
    keys, rest = divmod(total - queries, 2)
    if rest or keys <= 0 or keys % call.head_size:
        raise RuntimeError(
            f"{type(call.module).__name__}: its fused projection has {total} rows, which {call.shape[1]} query heads "
            f"of size {call.head_size} and equal numbers of keys and values cannot make. Use separate projections, or "
            "say which maps make q, k and v (projections=)."
        )
    return {"q": queries, "k": keys, "v": keys}
