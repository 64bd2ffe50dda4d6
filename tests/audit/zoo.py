"""Broken models, one for each class of bug, written as in the public report that each one names, and each with its
mended twin."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 16
X = torch.randn(3, 6, WIDTH, generator=torch.Generator().manual_seed(0))


@dataclass
class Broken:
    """A model with a bug and its twin without, what to feed them, and what the audit has to find."""

    report: str  # where people reported it
    build: Callable[[bool], nn.Module]  # True: with the bug
    kind: str
    where: str  # a module that the finding names
    level: str = "problem"
    example: Any = field(default_factory=lambda: X)


def heads(x: Tensor, n: int = 2) -> Tensor:
    return x.unflatten(-1, (n, -1)).transpose(1, 2)


class Block(nn.Module):
    """Pre-norm attention and feed-forward; each bug changes one method."""

    rate = 0.1

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.broken = broken
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.drop = nn.Dropout(self.rate)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = map(heads, self.qkv(x).chunk(3, -1))
        return self.proj(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def mlp(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(F.gelu(self.fc1(x))))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Two blocks and a classifier."""

    block: type[Block] = Block

    def __init__(self, broken: bool, **kw: Any) -> None:
        super().__init__()
        self.broken = broken
        self.blocks = nn.ModuleList(self.block(broken, **kw) for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(x).mean(1))


def of(block: type[Block], model: type[Model] = Model) -> Callable[[bool], nn.Module]:
    kind = type("Zoo", (model,), {"block": block})
    return lambda broken: kind(broken)


class NeverCalled(Block):
    def __init__(self, broken: bool) -> None:
        super().__init__(broken)
        self.attn_drop = nn.Dropout(0.1)

    def attend(self, q, k, v):
        a = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        return (a if self.broken else self.attn_drop(a)) @ v


class Discarded(Block):
    def mlp(self, x):
        x = self.fc2(F.gelu(self.fc1(x)))
        if self.broken:
            self.drop(x)
            return x
        return self.drop(x)


class FusedPath(Block):
    """The fused path leaves out what the eager path has."""

    def __init__(self, broken: bool) -> None:
        super().__init__(broken)
        self.attn_drop, self.fused = nn.Dropout(0.1), True

    def attend(self, q, k, v):
        if self.fused:
            rate = self.attn_drop.p if self.training and not self.broken else 0.0
            return F.scaled_dot_product_attention(q, k, v, dropout_p=rate)
        a = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        return self.attn_drop(a) @ v


class FunctionalInEval(Block):
    def __init__(self, broken: bool) -> None:
        super().__init__(broken)
        del self.drop

    def mlp(self, x):
        x = self.fc2(F.gelu(self.fc1(x)))
        return F.dropout(x, 0.1) if self.broken else F.dropout(x, 0.1, training=self.training)


class SdpaInEval(Block):
    def __init__(self, broken: bool) -> None:
        super().__init__(broken)
        self.attn_dropout = 0.1

    def attend(self, q, k, v):
        rate = self.attn_dropout if self.training or self.broken else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=rate)


class MhaFunctionInEval(Block):
    """`F.multi_head_attention_forward` is in training unless it is told otherwise."""

    def __init__(self, broken: bool) -> None:
        super().__init__(broken)
        self.mha_dropout = 0.1

    def attention(self, x):
        x = x.transpose(0, 1)
        out, _ = F.multi_head_attention_forward(
            x, x, x, WIDTH, 2, self.qkv.weight, self.qkv.bias, None, None, False, self.mha_dropout,
            self.proj.weight, self.proj.bias, training=self.training or self.broken, need_weights=False,
        )  # fmt: skip
        return out.transpose(0, 1)


class InAList(Model):
    """Modules in a Python list: `eval()` does not reach them."""

    def __init__(self, broken: bool) -> None:
        super().__init__(broken)
        drops = [nn.Dropout(0.1), nn.Dropout(0.1)]
        self.drops = drops if broken else nn.ModuleList(drops)

    def run(self, x):
        for block, drop in zip(self.blocks, self.drops, strict=True):
            x = drop(block(x))
        return x


class KeptInTraining(Block):
    """A module whose own `train` ignores the mode, for Monte-Carlo dropout that nobody switched off."""

    def __init__(self, broken: bool) -> None:
        super().__init__(broken)
        if broken:
            self.drop = AlwaysOn(0.1)


class AlwaysOn(nn.Dropout):
    def train(self, mode=True):
        return super().train(True)


class KeptInEval(Model):
    """A frozen backbone: `train` puts back into eval what should drop."""

    def train(self, mode=True):
        super().train(mode)
        if self.broken:
            self.blocks.eval()
        return self


class Redrawing(Model):
    def run(self, x):
        for block in self.blocks:
            x = checkpoint(
                block, x, use_reentrant=False, preserve_rng_state=not self.broken
            ) if self.training else block(x)  # fmt: skip
        return x


class OwnCheckpoint(torch.autograd.Function):
    """guided-diffusion's checkpoint: it runs the forward again without the generator's state."""

    @staticmethod
    def forward(ctx, run, state, x, *parameters):
        ctx.run, ctx.state, ctx.inputs = run, state, (x, parameters)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, gradient):
        x, parameters = ctx.inputs
        x = x.detach().requires_grad_()
        with torch.enable_grad(), torch.random.fork_rng(enabled=ctx.state is not None):
            if ctx.state is not None:
                torch.set_rng_state(ctx.state)
            out = ctx.run(x)
        return None, None, *torch.autograd.grad(out, (x, *parameters), gradient, allow_unused=True)


class RedrawingByHand(Model):
    def run(self, x):
        for block in self.blocks:
            state = None if self.broken else torch.get_rng_state()
            x = OwnCheckpoint.apply(block, state, x, *block.parameters())
        return x


class Reseeded(Model):
    def run(self, x):
        if self.broken:
            torch.manual_seed(0)
        return super().run(x)


class Stochastic(nn.Module):
    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x):
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep = 1 - self.drop_prob
        return x * x.new_empty(len(x), 1, 1).bernoulli_(keep) / keep


class ResetByAWrapper(Block):
    """A wrapper builds the blocks again and forgets the rate that the model declares."""

    rate = 0.0

    def __init__(self, broken: bool) -> None:
        super().__init__(broken)
        self.drop_path = Stochastic(0.0 if broken else 0.2)

    def mlp(self, x):
        return self.drop_path(super().mlp(x))


class Declaring(Model):
    def __init__(self, broken: bool) -> None:
        super().__init__(broken)
        self.drop_path_rate = 0.2


class ZeroByConfig(Model):
    """The configuration has a rate, the layers are built without it."""

    def __init__(self, broken: bool) -> None:
        super().__init__(broken)
        self.config = type("Config", (), {})()
        self.config.attention_dropout = 0.0
        self.config.hidden_dropout_prob = 0.1
        if broken:
            for block in self.blocks:
                block.drop.p = 0.0


class Detached(Block):
    def mlp(self, x):
        hidden = self.fc1(x)
        return self.drop(self.fc2(F.gelu(hidden.detach() if self.broken else hidden)))


class Frozen(Model):
    def __init__(self, broken: bool) -> None:
        super().__init__(broken)
        self.blocks[1].fc1.requires_grad_(not broken)


class HiddenRows(Block):
    """A float mask with -inf for padding hides every key of a padded sample: softmax over nothing."""

    def attend(self, q, k, v):
        mask = torch.zeros(q.shape[0], 1, 1, k.shape[2])
        mask[0, :, :, 0 if self.broken else 1 :] = -torch.inf
        return (q @ k.mT / math.sqrt(q.shape[-1]) + mask).softmax(-1) @ v


class BatchStatistics(Block):
    """A scale over everything, the batch included, as dynamic quantization takes it."""

    def mlp(self, x):
        largest = x.abs().amax() if self.broken else x.abs().amax((1, 2), keepdim=True)
        return super().mlp(x / largest)


class AcrossTheBatch(Model):
    """`batch_first` forgotten: attention looks from sample to sample."""

    def __init__(self, broken: bool) -> None:
        super().__init__(broken)
        self.mix = nn.MultiheadAttention(WIDTH, 2, batch_first=not broken)

    def run(self, x):
        return super().run(x + self.mix(x, x, x, need_weights=False)[0])


class Caching(Model):
    """A forward that carries something over to the next one."""

    def __init__(self, broken: bool) -> None:
        super().__init__(broken)
        self.memory = 0.0

    def run(self, x):
        out = super().run(x + self.memory)
        if self.broken:
            self.memory = out.mean().item()
        return out


class NoiseInEval(Block):
    def mlp(self, x):
        noise = 0.1 * torch.randn_like(x) if self.broken or self.training else 0.0
        return super().mlp(x + noise)


class ReturnsWeights(Model):
    """The weights that nn.MultiheadAttention returns are taken after dropout."""

    def __init__(self, broken: bool) -> None:
        super().__init__(broken)
        self.attn = nn.MultiheadAttention(
            WIDTH, 2, dropout=0.5 if broken else 0.0, batch_first=True
        )

    def forward(self, x):
        out, weights = self.attn(x, x, x)
        return self.head(self.run(out).mean(1)), weights


ZOO: dict[str, Broken] = {
    "never called": Broken(
        "zhouhaoyi/Informer2020#97", of(NeverCalled), "dropout_not_called", "blocks.0.attn_drop"
    ),
    "result discarded": Broken(
        "the class of Informer2020#97", of(Discarded), "dropout_without_effect", "blocks.0.drop"
    ),
    "fused path without dropout": Broken(
        "MagellaX/StreamAttn#28", of(FusedPath), "dropout_not_called", "blocks.0.attn_drop"
    ),
    "functional dropout in eval": Broken(
        "deepchem/deepchem#5121", of(FunctionalInEval), "eval_dropout", "blocks.0"
    ),
    "SDPA dropout in eval": Broken(
        "wenet-e2e/wenet#2699", of(SdpaInEval), "eval_dropout", "blocks.0"
    ),
    "MHA function in eval": Broken(
        "the class of pytorch/pytorch#124464", of(MhaFunctionInEval), "eval_dropout", "blocks.0"
    ),
    "dropout in a list": Broken("namisan/mt-dnn#45", InAList, "eval_dropout", ""),
    "kept in training": Broken(
        "d2l-ai/d2l-en#1093", of(KeptInTraining), "eval_dropout", "blocks.0.drop"
    ),
    "kept in eval": Broken(
        "allenai/allennlp#5073", KeptInEval, "dropout_without_effect", "blocks.0.drop"
    ),
    "checkpoint without state": Broken(
        "allenai/OLMo-core#828", Redrawing, "checkpoint_redraws", "blocks.0.drop"
    ),
    "checkpoint by hand": Broken(
        "openai/guided-diffusion#167", RedrawingByHand, "checkpoint_redraws", "blocks.0.drop"
    ),
    "seeded in forward": Broken(
        "the class of huggingface/transformers#31412", Reseeded, "repeated_draws", "blocks.0.drop"
    ),
    "drop path reset": Broken(
        "whai362/PVT#2", of(ResetByAWrapper, Declaring), "declared_rate", "drop_path_rate"
    ),
    "rate 0 by config": Broken(
        "huggingface/transformers#26616", ZeroByConfig, "declared_rate", "config.hidden_dropout_prob"
    ),
    "detached": Broken("a stray .detach()", of(Detached), "no_gradient", "blocks.0.fc1.weight"),
    "frozen layer": Broken("a stray .requires_grad_(False)", Frozen, "frozen", "blocks.1.fc1.weight", "note"),
    "fully hidden rows": Broken("pytorch/pytorch#103749", of(HiddenRows), "hidden_rows", "blocks.0"),
    "batch statistics": Broken(
        "FutureComputing4AI/MalConv2#6", of(BatchStatistics), "samples_mix", "blocks.0.fc1"
    ),
    "attention across the batch": Broken("yxlu-0102/MP-SENet#64", AcrossTheBatch, "samples_mix", "mix"),
    "eval carries state": Broken("a cache that is not reset", Caching, "eval_changes", "blocks.0.norm1"),
    "noise in eval": Broken("a sampler left on", of(NoiseInEval), "eval_random", "blocks.0"),
    "weights after dropout": Broken(
        "pytorch/pytorch#42929", ReturnsWeights, "dropped_weights", "attn", "warning"
    ),
}  # fmt: skip
