"""Residual branches of layers that are no module: the model keeps attention and feed-forward side by side in a list or
a dictionary and adds their residuals itself (vit-pytorch, x-transformers, FT-Transformer).

The module whose forward runs them, the owner, is followed as a block is (`residual.py`), all of its layers at once. A
branch is what came through a part of a layer, and belongs to the layer whose part ran last. What the owner computes
outside of these parts (an embedding, a convolution between stages, a head) makes no branch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from dampen.hooks.context import Frame, close_frame, frame_of, open_frame
from dampen.hooks.memory import Found, role_of
from dampen.hooks.origins import CLEAN, leaves
from dampen.hooks.residual import ResidualSocket
from dampen.names import leave_out
from dampen.regularizer import Regularizer

if TYPE_CHECKING:
    from dampen.hooks.context import Layer


class OwnerSite:
    """What is kept on a module that runs layers which are no modules."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.layers: list[tuple[Layer, bool]] = []  # with whether each has a feed-forward


class PartSite:
    """What is kept on a part of such a layer: attention, feed-forward, a norm."""

    def __init__(self, layer: Layer, owner: str) -> None:
        self.layer, self.owner = layer, owner


class OwnerFrame(Frame):
    """The frame of an owner's forward: attention runs in the frames of its layers."""

    def __init__(self, frames: Sequence[Frame], block: nn.Module) -> None:
        self.frames = list(frames)
        super().__init__(None, block)

    @property
    def inside(self) -> int:
        return sum(frame.inside for frame in self.frames)

    @inside.setter
    def inside(self, value: int) -> None:
        """Counted in the frames of the layers."""


class OwnerSocket(ResidualSocket):
    """Shows each residual branch of an owner's layers to the regularizers of its layer."""

    def __init__(
        self, site: OwnerSite, acting: dict[int, list[Regularizer]], roots: Any, frame: OwnerFrame
    ) -> None:
        self.site, self.acting, self.current = site, acting, site.layers[0][0]
        self.branches: dict[int, list[str]] = {}  # layer -> the roles of its branches so far
        self.running = 0  # parts that are running
        super().__init__([r for rs in acting.values() for r in rs], roots, self.current, frame)
        self.memory = None  # followed anew in every forward

    def enter(self, layer: Layer) -> None:
        """A part of a layer starts."""
        self.current, self.running = layer, self.running + 1
        self.branches.setdefault(id(layer), [])

    def _label(self, whole: bool) -> frozenset[str]:
        return super()._label(whole) if self.running else CLEAN

    def _add(self, residual: Tensor, branch: Tensor, found: Found) -> Tensor:
        self.layer, self.regularizers = self.current, self.acting.get(id(self.current), [])
        self.branches.setdefault(id(self.current), []).append(role_of(found.labels))
        return super()._add(residual, branch, found)

    def check_all(self) -> None:
        """Raise where a part that ran was not added."""
        names = ", ".join(sorted({r.name for rs in self.acting.values() for r in rs}))
        attended = {f"attention {i + 1}" for i in range(self.frame.attended)}
        missing = ["attention"] if attended - self.covered else []
        for layer, feeds in self.site.layers:
            roles = self.branches.get(id(layer))
            if roles is not None and feeds and not {"ffn", "parallel"} & set(roles):
                missing.append(f"the feed-forward of '{layer.site.name}'")
        if missing:
            raise RuntimeError(
                f"{type(self.frame.block).__name__} at '{self.site.name}' runs its layers itself, and not every branch "
                f"was seen to be added to the residual stream ({', '.join(missing)} not), so {names} cannot act on "
                f"its branches. Write them as x = x + branch(x), or {leave_out(self.site.layers[0][0].site.name)}."
            )


class OfLayer:
    """The socket of an owner, as the attention of one of its layers reports to it."""

    def __init__(self, socket: OwnerSocket, layer: Layer) -> None:
        self.socket, self.layer = socket, layer

    def leave(self, out: Any) -> None:
        self.socket.leave(out)


def owner_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a module that runs layers which are no modules, with the stage branch open."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        site: OwnerSite = self._dampen_owner
        acting = {
            id(layer): [r for r in layer.active(self) if "branch" in r.stages]
            for layer, _ in site.layers
        }
        if not any(acting.values()):
            return base(self, *args, **kwargs)
        opened = [layer for layer, _ in site.layers if frame_of(layer) is None]
        for layer in opened:
            open_frame(layer)
        frames: list[Any] = [frame_of(layer) for layer, _ in site.layers]
        roots = [t for t in leaves(args, kwargs) if isinstance(t, Tensor)]
        roots.sort(key=lambda t: not t.is_floating_point())
        socket = OwnerSocket(site, acting, roots, OwnerFrame(frames, self))
        try:
            for (layer, _), frame in zip(site.layers, frames, strict=True):
                frame.residual = OfLayer(socket, layer)
            with socket:
                out = base(self, *args, **kwargs)
            socket.check_all()
            return out
        finally:
            for frame in frames:
                frame.residual = None
            for layer in opened:
                close_frame(layer, layer.frames[-1])

    return forward


def part_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a part of a layer that is no module: it says which layer is running."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        site: PartSite = self._dampen_part
        frame = frame_of(site.layer)
        if frame is not None and isinstance(frame.residual, OfLayer):
            socket = frame.residual.socket
            socket.enter(site.layer)
            try:
                return base(self, *args, **kwargs)
            finally:
                socket.running -= 1
        if any("branch" in r.stages for r in site.layer.active(self)):
            raise RuntimeError(
                f"A part of the layer '{site.layer.site.name}' ran outside the forward of '{site.owner}', which holds "
                f"it, so its residual branches cannot be seen. Call that, or {leave_out(site.layer.site.name)}."
            )
        return base(self, *args, **kwargs)

    return forward


def owner_of(model: nn.Module, name: str) -> str:
    """The module whose forward runs the parts of the layer `name`: the closest one around them that has a forward."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        above = ".".join(parts[:end])
        if not isinstance(model.get_submodule(above), nn.ModuleList | nn.ModuleDict):
            return above
    return ""


def parts_with_forward(module: nn.Module) -> list[nn.Module]:
    """The modules that run where an element of a list does: itself, or what it holds."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        return [module]
    return [part for child in module.children() for part in parts_with_forward(child)]
