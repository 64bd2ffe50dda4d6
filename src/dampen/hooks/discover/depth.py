"""The depth of layers: their place in the order in which they run, from 0 to 1 in
each tower of the model."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from dampen.hooks.discover.layer import names_below
from dampen.regularizer import Site

if TYPE_CHECKING:
    from dampen.hooks.context import Layer

_TOWER = {
    "vision",
    "visual",
    "text",
    "image",
    "audio",
    "speech",
    "video",
    "language",
    "tower",
    "extractor",
}
_SIDE = re.compile("encoder|decoder")
_LIST_OF_ITS_OWN = {"r_layers"}  # of objects, beside the layers of words (LXMERT)


def towers_of(names: Sequence[str]) -> list[str]:
    """The tower that each layer belongs to: what its name says up to the first word for a modality
    or a side; where such a tower has several sides itself (an encoder-decoder beside a vision
    model), the side.

    >>> towers_of(["visual.blocks.0", "transformer.blocks.0", "down_blocks.0", "mid_block", "up_blocks.0"])
    ['visual', '', '', '', '']
    >>> towers_of(["vision_model.encoder.layers.0", "vision_model.head", "language.encoder.0", "language.decoder.0"])
    ['vision_model', 'vision_model', 'language.encoder', 'language.decoder']
    """
    found = [_tower_of(name) for name in names]
    sides: dict[str, set[str]] = {}
    for tower, side in found:
        sides.setdefault(tower, set()).update({side} - {tower})
    towers = [side if len(sides[tower]) > 1 else tower for tower, side in found]
    return [_upper_half(tower, towers) for tower in towers]


def _upper_half(tower: str, towers: Sequence[str]) -> str:
    """A decoder that continues where a tower of its name ends: "text" and "text_decoder" of CoCa
    are one path."""
    lower = tower.removesuffix("_decoder")
    return lower if lower in towers else tower


def _tower_of(name: str) -> tuple[str, str]:
    """What a name says up to its first word for a tower, and up to its last one for a side.
    Elements of a list are stages of one path, so the part after a number says nothing."""
    parts = name.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
    if _LIST_OF_ITS_OWN & set(parts[:first]):
        alone = ".".join(parts[:first])
        return alone, alone
    sides = [i + 1 for i, part in enumerate(parts[:first]) if _SIDE.search(part)]
    words = [i + 1 for i, part in enumerate(parts[:first]) if _TOWER & set(part.lower().split("_"))]
    ends = sorted(sides + words)
    tower = ".".join(parts[: ends[0]]) if ends else ""
    return tower, ".".join(parts[: sides[-1]]) if sides else tower


def sites_of(names: Sequence[str], depth: str) -> list[Site]:
    """The position of each layer among all that were chosen, and in its own tower."""
    if depth not in ("stack", "model"):
        raise ValueError(f"depth must be 'stack' or 'model', got {depth!r}.")
    towers = towers_of(names) if depth == "stack" else [""] * len(names)
    several = len(set(towers)) > 1
    return [
        Site(
            name, i, len(names), (towers[:i].count(tower), towers.count(tower)) if several else None
        )
        for i, (name, tower) in enumerate(zip(names, towers, strict=True))
    ]


class Order:
    """The order in which the layers of one model run, as far as it is known."""

    def __init__(self, layers: Sequence[Layer], depth: str) -> None:
        self.layers, self.depth = list(layers), depth
        self.known = False  # whether a forward has run all of them
        self.ran: list[Layer] = []  # by the forward under way, in the order of their starts
        self.thread = threading.get_ident()
        self.start()

    def start(self) -> None:
        """A forward of the model starts: use what the one before it has
        shown, and watch this one."""
        if self.known:
            return
        if self.ran:
            self._settle()
            self.known = len(self.ran) == len(self.layers)
        self.ran, self.thread = [], threading.get_ident()
        holding = names_below(layer.site.name for layer in self.layers)
        self.around = {id(layer) for layer in self.layers if layer.site.name in holding}
        for layer in self.layers:
            layer.order = None if self.known else self

    def saw(self, layer: Layer, module: nn.Module) -> None:
        """A module of a layer starts, for the first time in this forward. A layer around others (a
        model with a pooling of its own) starts with its parts."""
        starts = id(layer) not in self.around or "_dampen_block" not in vars(module)
        if starts and threading.get_ident() == self.thread:
            layer.order = None
            self.ran.append(layer)

    def settle(self) -> None:
        """Use what has been seen so far, between forwards."""
        if self.ran:
            self.start()

    def _settle(self) -> None:
        places = sorted(self.layers.index(layer) for layer in self.ran)
        order = list(self.layers)
        for place, layer in zip(places, self.ran, strict=True):
            order[place] = layer
        if order == self.layers:
            return
        self._check_first(order[0])
        self.layers = order
        sites = sites_of([layer.site.name for layer in order], self.depth)
        for layer, site in zip(order, sites, strict=True):
            layer.site = site
            for clone in layer.clones:
                clone.place(site)

    def _check_first(self, first: Layer) -> None:
        """Raise where a method on the tokens that enter the first layer sits in another one."""
        before = self.layers[0]
        method = next((c for c in before.clones if "tokens" in c.stages), None)
        if method is not None and first is not before:
            raise RuntimeError(
                f"{type(method).__name__} acts on the tokens "
                "that enter the first layer and was put into "
                f"'{before.site.name}', but '{first.site.name}' runs before "
                "it. Choose the layers so that the first "
                "one listed runs first (target_modules=), or leave the method out."
            )

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "ran": [], "around": set()}
