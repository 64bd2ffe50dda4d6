"""The models on which contracts are checked, and how each is run with regularizers in it.

An own ViT, a timm ViT, a causal Llama and a padded BERT.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dampen._torch import declare_torchvision_operators
from dampen.handle import Handle, regularize
from dampen.hooks.discover.sites import find_layers
from dampen.methods.drop_key import DropKey
from dampen.models import FeatureEncoder, ViT
from dampen.regularizer import Regularizer

# --- the models
#
# The four models on which contracts are checked: an own ViT, a timm ViT, a causal Llama, a
# padded BERT, all tiny.

# with patches of 4 and a class token: 65 tokens, enough for the fused kernel
IMAGE = 32
TOKENS = 9


@dataclass(frozen=True)
class Subject:
    """A model to try a regularizer on, with a batch, its logits, and what must not matter to
    them."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]]
    logits: Callable[[Any], Tensor]
    hide: Callable[[dict[str, Tensor]], tuple[dict[str, Tensor], Tensor]] | None = None
    """A second batch that differs only where some positions must not look, and those positions (B,
    N)."""
    padded: bool = False
    """Whether the hidden tokens are padding: then penalties must not move either."""

    library: str = ""
    """The package it comes from, where that is not dampen itself."""

    adapted: bool = False
    """Whether it has low-rank adapters, for methods that need them."""

    def missing(self) -> str:
        """The library without which it cannot be built; empty where it can."""
        if self.library and importlib.util.find_spec(self.library) is None:
            return self.library
        return ""

    def model(self, seed: int = 0) -> nn.Module:
        """A fresh model in training mode, the same for the same seed.

        Args:
            seed: of the weights or of the batch.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.build()
            if self.adapted:
                add_adapters(model)
            return model.train()

    def inputs(self, seed: int = 1) -> dict[str, Tensor]:
        """A batch, the same for the same seed.

        Args:
            seed: of the weights or of the batch.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.batch()


class LowRankLinear(nn.Module):
    """A linear layer with a low-rank adapter beside it, y = W x + b + s B A x, in the form of
    peft's: for models without peft.

    Args:
        base: the linear layer.
        rank: of the adapter.
    """

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer, self.active_adapters = base, ["default"]
        self.scaling = {"default": 0.5}
        a = nn.Linear(base.in_features, rank, bias=False)
        b = nn.Linear(rank, base.out_features, bias=False)
        self.lora_A, self.lora_B = nn.ModuleDict({"default": a}), nn.ModuleDict({"default": b})
        self.disable_adapters = self.merged = False

    def forward(self, x: Tensor) -> Tensor:
        update: Tensor = self.lora_B["default"](self.lora_A["default"](x))
        y: Tensor = self.base_layer(x)
        return y + self.scaling["default"] * update


def add_adapters(model: nn.Module) -> None:
    """Put an adapter beside every linear layer of a model's layers.

    Args:
        model: not regularized.
    """
    for plan in find_layers(model, whole_stacks=True):
        for name, linear in plan.linears.items():
            owner, _, leaf = name.rpartition(".")
            # torch's attention reads the weight of its output layer and calls no module there
            inside = isinstance(model.get_submodule(owner), nn.MultiheadAttention)
            if isinstance(linear.module, nn.Linear) and not inside:
                setattr(model.get_submodule(owner), leaf, LowRankLinear(linear.module))


def adapted(model: nn.Module, make: Make) -> nn.Module:
    """The model, with adapters where a method needs them.

    Args:
        model: not regularized.
        make: makes the regularizer.
    """
    if with_example(make)().needs_adapters:
        add_adapters(model)
    return model


def subject_for(make: Make | Sequence[Make], subject: Subject) -> Subject:
    """The subject, with adapters where a method needs them.

    Args:
        make: makes the regularizer, or several.
        subject: the model to try it on.
    """
    makes = [make] if callable(make) else list(make)
    if any(with_example(m)().needs_adapters for m in makes):
        return replace(subject, adapted=True)
    return subject


def _vit(depth: int = 2) -> nn.Module:
    return ViT(image_size=IMAGE, patch_size=4, classes=5, width=16, depth=depth, heads=2, mlp=24)


def _timm() -> nn.Module:
    declare_torchvision_operators()
    import timm

    return timm.create_model(
        "vit_tiny_patch16_224",
        img_size=IMAGE,
        patch_size=4,
        embed_dim=16,
        depth=2,
        num_heads=2,
        num_classes=5,
    )


def _llama() -> nn.Module:
    declare_torchvision_operators()
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 19,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
    }
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, **heads, max_position_embeddings=64, use_cache=False)
    return LlamaForCausalLM(config)


def _bert() -> nn.Module:
    declare_torchvision_operators()
    from transformers import BertConfig, BertForTokenClassification

    sizes: dict[str, Any] = {
        "vocab_size": 19,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
    }
    rest: dict[str, Any] = {"num_attention_heads": 2, "num_labels": 5}
    rest |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(**sizes, **rest, max_position_embeddings=64)
    return BertForTokenClassification(config)


def _images(name: str) -> Callable[[], dict[str, Tensor]]:
    return lambda: {name: torch.randn(3, 3, IMAGE, IMAGE)}


def _text() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(1, 19, (3, TOKENS))}


def _padded_text() -> dict[str, Tensor]:
    mask = torch.ones(3, TOKENS, dtype=torch.long)
    mask[1, 6:], mask[2, 3:] = 0, 0
    return {**_text(), "attention_mask": mask}


def _change_future(batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    ids = batch["input_ids"].clone()
    ids[:, 5:] = (ids[:, 5:] + 7) % 19
    return {**batch, "input_ids": ids}, (torch.arange(TOKENS) < 5).expand(3, -1)


def _change_padding(batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    kept = batch["attention_mask"].bool()
    ids = torch.where(kept, batch["input_ids"], (batch["input_ids"] + 7) % 19)
    return {**batch, "input_ids": ids}, kept


SUBJECTS = {
    s.name: s
    for s in (
        Subject("vit", _vit, _images("images"), lambda out: out),
        Subject("timm_vit", _timm, _images("x"), lambda out: out, library="timm"),
        Subject(
            "llama", _llama, _text, lambda out: out.logits, _change_future, library="transformers"
        ),
        Subject(
            "bert",
            _bert,
            _padded_text,
            lambda out: out.logits,
            _change_padding,
            padded=True,
            library="transformers",
        ),
    )
}


def _encoder(depth: int = 2) -> nn.Module:
    return FeatureEncoder(
        features=6, classes=5, width=16, depth=depth, heads=2, mlp=24, max_tokens=64
    )


ENCODER = Subject("encoder", _encoder, lambda: {"x": torch.randn(3, TOKENS, 6)}, lambda out: out)
"""Sequences of any length, for what depends on it."""

SHALLOW = Subject("vit", lambda: _vit(depth=1), _images("images"), lambda out: out)
"""One layer, for the compilers, whose time grows with the number of layers."""

SHORT_ENCODER = Subject("encoder", lambda: _encoder(depth=1), ENCODER.batch, lambda out: out)
"""The same of the encoder."""


# --- a model with regularizers in it
#
# A model with regularizers in it, run the same way for every contract, and what contracts
# compare.


class ContractBroken(AssertionError):
    """A regularizer does not keep what every regularizer promises."""


def require(condition: bool | Tensor, message: str) -> None:
    if not condition:
        raise ContractBroken(message)


def same(a: Tensor, b: Tensor, message: str, tolerance: float | None = 0.0) -> None:
    """Equal to the bit (tolerance 0), or close.

    Args:
        a: one.
        b: the other.
        message: of the error.
        tolerance: relative and absolute; 0: equal to the bit.
    """
    require(a.shape == b.shape, f"{message}: shapes {tuple(a.shape)} and {tuple(b.shape)}")
    if tolerance == 0.0:
        require(torch.equal(a, b), f"{message}: they differ by up to {_gap(a, b):.3g}")
    else:
        require(
            torch.allclose(a, b, rtol=tolerance or 0, atol=tolerance or 0),
            f"{message}: off by up to {_gap(a, b):.3g}",
        )


def same_gradients(
    a: dict[str, Tensor], b: dict[str, Tensor], message: str, tolerance: float = 1e-5
) -> None:
    require(
        a.keys() == b.keys(),
        f"{message}: gradients of {sorted(a.keys() ^ b.keys())} exist only once",
    )
    for name in a:
        same(a[name], b[name], f"{message}: gradient of {name}", tolerance)


def _gap(a: Tensor, b: Tensor) -> float:
    if a.numel():
        return (a.double() - b.double()).abs().max().item()
    return 0.0


Make = Callable[[], Regularizer]


def attached(model: nn.Module, methods: Sequence[Regularizer], **options: Any) -> Handle:
    """The handle of a model with methods, which may be of one class: contracts
    pair a method with itself.

    Args:
        model: what to regularize.
        methods: the regularizers, to which a companion is added where one needs it.
        options: for `regularize`.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "regularize got .* times", UserWarning)
        return regularize(model, with_companion(list(methods)), **options)


class Attached:
    """A subject's model with regularizers attached, and one training step of it.

    Args:
        make: makes the regularizer: a class, or a function without arguments.
        subject: the model to try it on.
        neutral: every rate and coefficient is 0.
    """

    def __init__(
        self, make: Make | Sequence[Make], subject: Subject, neutral: bool = False
    ) -> None:
        self.subject, self.model, self.inputs = subject, subject.model(), subject.inputs()
        makes = [make] if callable(make) else list(make)
        self.reg: Handle = attached(self.model, [m() for m in makes])
        self.reg.attach_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        # contracts compare draw by draw with compiled graphs and plain calls; a doubled batch draws
        # in another order
        self.reg.prefix.doubled.why = "a contract compares two passes draw by draw"
        if neutral:
            for clone in self.reg.clones:
                # the formula at 0 is looked at, not that it is left out
                clone.zero_is_identity = False
                clone.neutral()

    def step(
        self,
        inputs: dict[str, Tensor] | None = None,
        seed: int = 2,
        run: Callable[..., Any] | None = None,
        backward: bool = True,
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Loss, terms and the logits of the first pass, after a backward."""
        inputs = self.inputs if inputs is None else inputs
        run = self.model if run is None else run
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        seen: list[Tensor] = []

        def forward() -> Any:
            out = run(**inputs)
            seen.append(self.subject.logits(out))
            return out

        loss, terms = self.reg.loss(
            forward,
            lambda out: task_loss(self.subject.logits(out)),
            logits=self.subject.logits,
            valid=valid_of(inputs),
        )
        if backward:
            loss.backward()
        return loss.detach(), {k: v.detach() for k, v in terms.items()}, seen[0].detach()

    def gradients(self) -> dict[str, Tensor]:
        """Copies of the gradients now in the model."""
        return {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}

    def copy(self) -> Attached:
        """An independent copy, model and handle together."""
        twin = copy.deepcopy(self)
        twin.reg.attach_optimizer(torch.optim.SGD(twin.model.parameters(), lr=0.1))
        return twin


def with_example(make: Make) -> Make:
    """A class that has no effect by default, with its example's arguments; the
    rest stays.

    Args:
        make: makes the regularizer: a class, or a function without arguments.
    """
    if isinstance(make, type) and issubclass(make, Regularizer) and make.example:
        return functools.partial(make, **make.example)
    return make


def with_companion(methods: list[Regularizer]) -> list[Regularizer]:
    """Methods that compare two passes need something that differs between them.

    Args:
        methods: regularizers to attach.
    """
    if any(m.passes > 1 and not m.stochastic for m in methods) and not any(
        m.stochastic and m.passes == 1 for m in methods
    ):
        return [*methods, DropKey(0.2)]
    return methods


def task_loss(logits: Tensor) -> Tensor:
    """A cross entropy with fixed labels.

    Args:
        logits: of the model.
    """
    flat = logits.float().flatten(0, -2)
    return F.cross_entropy(flat, torch.arange(len(flat), device=flat.device) % flat.shape[-1])


def valid_of(inputs: dict[str, Tensor]) -> Tensor | None:
    """The positions that are not padding, where the batch says so.

    Args:
        inputs: one batch of the subject.
    """
    if "attention_mask" in inputs:
        return inputs["attention_mask"].bool()
    return None


def plain_logits(subject: Subject, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """What a model gives, without gradient.

    Args:
        subject: the model to try it on.
        model: of the subject.
        inputs: one batch of the subject.
    """
    with torch.no_grad():
        return subject.logits(model(**inputs))
