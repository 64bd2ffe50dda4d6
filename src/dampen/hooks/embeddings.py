"""The stage `embeddings`: what a model's input or patch embedding gives out, before positions are added.

The embedding is found once, when a method asks for the stage: by the model's own word (`get_input_embeddings` of
transformers, `patch_embed` of timm), then by the usual names. Padding is read from the `attention_mask` argument of the
innermost module around the embedding that takes one (a backbone, or one side of an encoder-decoder), because outside
attention nothing else tells it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from dampen._torch import is_empty, refuse_nested
from dampen.containers import first_of, with_first
from dampen.hooks.context import ModelSite
from dampen.regularizer import Regularizer, UnsupportedModel, in_order

_NOT_TOKENS = re.compile(r"pos|type|segment|relative|time|norm|rotary", re.IGNORECASE)
_PATCHES = re.compile(r"(^|\.)(patch_?embed\w*|conv_proj|feature_projection|embed)$", re.IGNORECASE)


class MaskSite:
    """What is kept on a module that is called with `attention_mask`: where the argument stands, and the present one."""

    def __init__(self, position: int) -> None:
        self.position = position
        self.mask: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "mask": None}


class EmbeddingSite:
    """What is kept on an embedding: the clones that act on its output, the model's site, and who knows the mask."""

    def __init__(self, clones: list[Regularizer], model: ModelSite, masks: MaskSite | None) -> None:
        self.clones, self.model, self.masks = in_order(clones), model, masks


def mask_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a module that is called with `attention_mask`: kept while it runs."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        site: MaskSite = self._dampen_mask
        mask = args[site.position] if site.position < len(args) else kwargs.get("attention_mask")
        site.mask = mask if isinstance(mask, Tensor) else None
        out = base(self, *args, **kwargs)
        site.mask = None
        return out

    return forward


def embedding_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of an embedding with the stage embeddings open."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        site: EmbeddingSite = self._dampen_embedding
        out = base(self, *args, **kwargs)
        active = [r for r in site.clones if site.model.acts(r, self.training)]
        if not active:
            return out
        x = first_of(out)
        if x is None:
            raise RuntimeError(
                f"{type(self).__name__} returned a {type(out).__name__} in which no embeddings were found, so "
                f"{type(active[0]).__name__} cannot act on them. Return a tensor, or a tuple, a dict or a dataclass."
            )
        refuse_nested(x, f"{type(active[0]).__name__} at the input embedding")
        if is_empty(x):
            return out
        valid = fit_mask(None if site.masks is None else site.masks.mask, x)
        ids = next((a for a in args if isinstance(a, Tensor) and not a.is_floating_point()), None)
        for r in active:
            if r.reads_ids:
                r.input_ids = ids
            x = r.embeddings(x, valid)
            r.input_ids = None
        return with_first(out, x)

    return forward


def fit_mask(mask: Tensor | None, x: Tensor) -> Tensor | None:
    """A model's 2-d mask as bool (B, N) for embeddings (B, N, D); None where it is of another shape, or none came."""
    if mask is None or mask.ndim != 2 or x.ndim != 3 or mask.shape != x.shape[:2]:
        return None
    return mask != 0


def mask_owner(model: nn.Module, name: str) -> tuple[nn.Module, int] | None:
    """The innermost module around the embedding `name` whose forward takes `attention_mask`, and at which position."""
    parts = name.split(".")
    for end in range(len(parts) - 1, -1, -1):
        owner = model.get_submodule(".".join(parts[:end]))
        names = list(inspect.signature(type(owner).forward).parameters)[1:]
        if "attention_mask" in names:
            return owner, names.index("attention_mask")
    return None


def open_embeddings(
    model: nn.Module, embeddings: dict[str, nn.Module], clones: list[Regularizer], site: ModelSite
) -> list[tuple[nn.Module, str, object]]:
    """What to swap: each embedding. Each module that knows the mask is watched from here on."""
    swaps: list[tuple[nn.Module, str, object]] = []
    known: dict[int, MaskSite] = {}
    for name, module in embeddings.items():
        found = mask_owner(model, name)
        if found is not None and id(found[0]) not in known:
            known[id(found[0])] = _mask_site(*found)
        swaps.append(
            (
                module,
                "embedding",
                EmbeddingSite(clones, site, known[id(found[0])] if found else None),
            )
        )
    return swaps


def mask_sites(model: nn.Module, name: str) -> list[MaskSite]:
    """The modules around `name` whose forward takes `attention_mask`, watched, the innermost first."""
    sites = []
    while (found := mask_owner(model, name)) is not None:
        sites.append(_mask_site(*found))
        if found[0] is model:
            break
        name = next(n for n, m in model.named_modules() if m is found[0])
    return sites


def _mask_site(owner: nn.Module, position: int) -> MaskSite:
    """What watches a module for its mask: one, whoever asks for it."""
    from dampen.hooks.swap import swap  # which knows this module

    site: MaskSite | None = vars(owner).get("_dampen_mask")
    if site is None:
        site = MaskSite(position)
        swap(owner, "mask", site)
    return site


def find_embeddings(model: nn.Module) -> dict[str, nn.Module]:
    """The input embeddings of a model by dotted name: one, or one per side of an encoder-decoder."""
    named = dict(model.named_modules())
    tokens: dict[str, nn.Module] = {
        n: m
        for n, m in named.items()
        if isinstance(m, nn.Embedding) and not _NOT_TOKENS.search(last(n))
    }
    if len(tokens) > 1 and any("decoder" in n or "target" in n for n in tokens):
        return tokens
    for owner in named.values():  # the model itself first, then what it wraps (SentenceTransformer)
        told = _told(owner)
        name = next((n for n, m in named.items() if m is told), None)
        if name is not None and told is not None:
            return {name: told}
    patches = {n: m for n, m in named.items() if _PATCHES.search(n)}
    if patches and not tokens:
        first = next(iter(patches))
        return {first: patches[first]}
    if tokens:
        first = next(iter(tokens))
        return {first: tokens[first]}
    raise UnsupportedModel(
        f"{type(model).__name__} has no input embedding that could be found: no get_input_embeddings(), no "
        "nn.Embedding of tokens, no module named patch_embed. "
        "Name the module that makes tokens of the input 'patch_embed' or 'embed', or leave the method out."
    )


def last(name: str) -> str:
    """The last part of a dotted name."""
    return name.rsplit(".", 1)[-1]


def _told(model: nn.Module) -> nn.Module | None:
    """What the model itself calls its input embedding."""
    ask = getattr(model, "get_input_embeddings", None)
    if callable(ask):
        try:
            told = ask()
        except NotImplementedError:  # transformers: this architecture does not say
            return None
        return told if isinstance(told, nn.Module) else None
    return None
