"""What the sites of a layer share during one forward of its block, and no longer.

A frame is opened when the block's forward starts and closed when it ends, whatever ended it, so that an error leaves
nothing behind. Each thread has its own: a layer keeps the open ones in a list and `frame_of` finds that of the calling
thread. A ContextVar or `threading.local` would be the usual means, but both end a compiled graph; inside one there is
a single thread, and its frame carries no thread at all.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dampen.hooks.experts import Routing
    from dampen.hooks.residual import ResidualSocket
    from dampen.hooks.state import Layer
    from dampen.hooks.stream import StreamSocket
    from dampen.regularizer import Call


class Frame:
    """The state of one forward of one block."""

    def __init__(self, thread: int, in_block: bool) -> None:
        self.thread = thread  # 0 inside a compiled graph
        self.in_block = in_block  # False where no module is the block: then nothing tells what runs before what
        self.block: Any = None  # the module whose forward this is
        self.restart()

    def restart(self) -> None:
        """Nothing of the forward has run yet."""
        self.call: Call | None = None  # the attention under way
        self.multiplying = False  # a linear site is running its own F.linear
        self.valid: Tensor | None = None  # (B, N): the tokens of this forward that are not padding
        self.sequence_first = False  # the feed-forward sees (N, B, D)
        self.early = ""  # a feed-forward map that ran before padding was known
        self.residual: ResidualSocket | StreamSocket | None = None  # sees the residual branches, where a method acts
        self.inside = 0  # attention modules of the block that are running
        self.attended = 0  # those that have run
        self.hits = 0  # linear maps seen since the block started
        self.routing: Routing | None = None  # the mixture of experts that is running
        self.memory: dict[int, Any] = {}  # what a clone (by its serial number) keeps from branch to branch


def open_frame(layer: Layer, in_block: bool = True) -> Frame:
    """A new frame for the layer; give it back with `close_frame` in a `finally`."""
    frame = Frame(_thread(), in_block)
    layer.frames.append(frame)
    return frame


def close_frame(layer: Layer, frame: Frame) -> None:
    """The end of a forward. What it held is let go at once: a circle of references would keep the forward's tensors
    until Python next looks for circles, and the next step would have to find memory elsewhere."""
    layer.frames.remove(frame)
    frame.residual = frame.call = None


def frame_of(layer: Layer) -> Frame | None:
    """The frame that the calling thread has open in this layer, the innermost if there are several."""
    if not layer.frames:
        return None
    thread = _thread()
    if thread:
        for frame in reversed(layer.frames):
            if frame.thread == thread:
                return frame
    # A graph knows no thread, and code between two graphs finds the frame of the graph around it: the only one, then.
    found = [frame for frame in layer.frames if not (thread and frame.thread)]
    if len(found) > 1:
        raise RuntimeError(
            f"Two threads run compiled parts of the layer '{layer.site.name}' at the same time, and a compiled graph "
            "cannot tell them apart. Give each thread a copy of the model (copy.deepcopy), or do not compile it."
        )
    return found[0] if found else None


def _thread() -> int:
    return 0 if torch.compiler.is_compiling() else threading.get_ident()
