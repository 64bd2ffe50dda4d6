"""The probe of the model sweep notices what it is there for: each fault is planted in a toy model, and found."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dampen
from benchmarks.model_probe import (
    Core,
    Probe,
    _blocks_of_queries,
    depth_finding,
    said,
    verdict,
)
from dampen.native import library


@pytest.fixture(autouse=True)
def without_native_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("DAMPEN_NATIVE", "0")
        library.reset()
        yield
    library.reset()


class Attention(nn.Module):
    def __init__(self, causal: bool, eager: bool) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.causal, self.eager = causal, eager

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        q, k, v = self.qkv(x).view(samples, tokens, 3, 4, 4).permute(2, 0, 3, 1, 4)
        if self.eager:
            scores = q @ k.mT / 2
            if self.causal:
                hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
                scores = scores.masked_fill(hidden, -torch.inf)
            out = scores.softmax(-1) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.proj(out.transpose(1, 2).reshape(samples, tokens, width))


class Block(nn.Module):
    def __init__(self, causal: bool, eager: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attn = Attention(causal, eager)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Toy(nn.Module):
    def __init__(self, causal: bool = True, eager: bool = False, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList([Block(causal, eager) for _ in range(depth)])

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return x


def probe(eager: bool = False, **methods: object) -> Probe:
    torch.manual_seed(0)
    ids = torch.randint(0, 20, (4, 9))
    ids[:, -1] = torch.arange(4)
    return Probe(Toy(eager=eager), {"input_ids": ids}, methods)  # type: ignore[arg-type]


def finding(
    name: str,
    method: type[dampen.Regularizer],
    *arguments: object,
    eager: bool = False,
    **values: object,
):
    return probe(eager, **{name: lambda: method(*arguments, **values)}).run((name,))[name]


@pytest.mark.parametrize("eager", [False, True])
def test_what_dampen_does_in_a_toy_model_works(eager: bool) -> None:
    found = probe(eager).run()
    assert {name: f.outcome for name, f in found.items()} == dict.fromkeys(found, "works"), found
    assert verdict(found) == "works"
    assert found["DropKey"].total == 3
    assert found["FeedForwardDropout"].total == 6
    assert found["DropPath"].total == 6


def test_the_facts_of_a_plain_model_are_read_off_its_operations() -> None:
    facts = probe().facts
    assert [c.module for c in facts.cores] == [f"blocks.{i}.attn" for i in range(3)]
    assert all(columns.tolist() == list(range(32, 48)) for _, columns in facts.values.values())
    assert facts.attention == {
        f"blocks.{i}.attn.{n}.weight" for i in range(3) for n in ("qkv", "proj")
    }
    assert facts.feed_forward_weights == {
        f"blocks.{i}.mlp.{n}.weight" for i in range(3) for n in (0, 2)
    }
    first = facts.cores[0].seen
    assert first is not None
    assert torch.equal(first[0], torch.ones(9, 9, dtype=torch.bool).tril())


class LeaksOneFutureKey(dampen.DropKey):
    def __init__(self, rate: float) -> None:
        super().__init__(rate)
        self.stages = frozenset({"mask", "probs"})

    def probs(self, a: Tensor, call: object) -> Tensor:
        a = a.clone()
        a[..., -2, -1] = a[..., -2, -1] + 0.01
        return a


class SkipsALayer(dampen.DropKey):
    def mask(self, q: Tensor, k: Tensor, call: object) -> Tensor:
        hidden = super().mask(q, k, call)  # type: ignore[arg-type]
        return hidden & False if self.site is not None and self.site.index == 1 else hidden


class DoublesItsPenalty(dampen.ExplicitDropout):
    def penalize(self, value: object, name: str | None = None) -> None:
        super().penalize(value, name)  # type: ignore[arg-type]
        super().penalize(value, name)  # type: ignore[arg-type]


class DropsTheValuesToo(dampen.FeedForwardDropout):
    roles = frozenset({"ffn_in", "ffn_out", "qkv"})


class DropsNoSecondBranch(dampen.DropPath):
    def branch(self, b: Tensor, call: object) -> Tensor:
        return b if self.site is not None and self.site.index == 1 else super().branch(b, call)  # type: ignore


@pytest.mark.parametrize("eager", [False, True])
def test_a_leak_of_one_future_key_is_wrong(eager: bool) -> None:
    found = finding("masks", LeaksOneFutureKey, 0.5, eager=eager)
    assert found.outcome == "WRONG"
    assert "future" in found.why


@pytest.mark.parametrize("eager", [False, True])
def test_a_layer_skipped_without_a_word_is_silent(eager: bool) -> None:
    found = finding("DropKey", SkipsALayer, 0.4, eager=eager)
    assert (found.outcome, found.reached, found.total) == ("SILENT", 2, 3)
    assert "blocks.1.attn" in found.why


def test_another_rate_than_the_one_given_is_wrong() -> None:
    found = finding("DropKey", dampen.DropKey, 0.55)
    assert found.outcome == "WRONG"
    assert "share of hidden keys" in found.why


@pytest.mark.parametrize(
    ("name", "term"), [("ExplicitDropout(value)", "value"), ("ExplicitDropout(ffn)", "ffn")]
)
def test_a_penalty_twice_its_formula_is_wrong(name: str, term: str) -> None:
    assert finding(name, dampen.ExplicitDropout, rate=0.2, **{term: 1.0}).outcome == "works"
    found = finding(name, DoublesItsPenalty, rate=0.2, **{term: 1.0})
    assert found.outcome == "WRONG"
    assert "formula" in found.why


def test_a_feed_forward_method_on_a_projection_of_attention_is_wrong() -> None:
    found = finding("FeedForwardDropout", DropsTheValuesToo, 0.5)
    assert found.outcome == "WRONG"
    assert "blocks.0.attn.qkv.weight" in found.why


class WithHead(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 20)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(super().forward(input_ids))


def test_a_feed_forward_method_on_a_layer_that_nobody_names_is_wrong() -> None:
    torch.manual_seed(0)
    model = WithHead()
    ids = {"input_ids": torch.randint(0, 20, (4, 9))}
    assert Probe(model, ids).run(("FeedForwardDropout",))["FeedForwardDropout"].outcome == "works"

    def make() -> dampen.FeedForwardDropout:
        model.head.register_forward_pre_hook(
            lambda module, given: F.dropout(given[0], 0.5, module.training)
        )
        return dampen.FeedForwardDropout(0.5)

    found = Probe(model, ids, {"FeedForwardDropout": make}).run(("FeedForwardDropout",))
    assert found["FeedForwardDropout"].outcome == "WRONG"
    assert found["FeedForwardDropout"].why.endswith("print(reg) does not name: head.weight")


def test_a_branch_that_is_never_dropped_is_silent() -> None:
    found = finding("DropPath", DropsNoSecondBranch, 0.9)
    assert (found.outcome, found.reached, found.total) == ("SILENT", 4, 6)


class Crashes(dampen.DropKey):
    def mask(self, q: Tensor, k: Tensor, call: object) -> Tensor:
        return {}[0]  # type: ignore[no-any-return]


def test_an_error_that_is_no_refusal_is_a_crash_and_the_model_is_whole_afterwards() -> None:
    one = probe(DropKey=lambda: Crashes(0.4))
    found = one.run(("DropKey", "DropHead"))
    assert found["DropKey"].outcome == "CRASH"
    assert found["DropHead"].outcome == "works"
    assert verdict(found) == "CRASH"


def test_a_refusal_is_told_from_a_crash() -> None:
    found = finding("DropKey", dampen.DropKey, 0.4, unit="block", window=2, grid=(5, 5))
    assert found.outcome == "refused"
    assert "grid" in found.why


def core(index: int, site: str, depth: float, before: int) -> Core:
    return Core(
        index, site, "eager", (1, 1, 1), None, None, frozenset(), before, site=site, depth=depth
    )


@pytest.mark.parametrize(
    ("depths", "outcome"),
    [
        ([("down.0", 0.0), ("mid.0", 0.5), ("up.0", 1.0)], "works"),
        ([("down.0", 0.5), ("mid.0", 0.0), ("up.0", 1.0)], "WRONG"),
        ([("encoder.0", 0.0), ("encoder.1", 1.0), ("decoder.0", 0.0), ("decoder.1", 1.0)], "works"),
        ([("layers.0", 0.0), ("layers.1", 1.0), ("layers.2", 0.5)], "WRONG"),
    ],
)
def test_depth_rises_with_the_order_of_execution(
    depths: list[tuple[str, float]], outcome: str
) -> None:
    cores = [core(i, site, depth, (1 << i) - 1) for i, (site, depth) in enumerate(depths)]
    assert depth_finding(cores).outcome == outcome


def test_blocks_of_queries_are_one_attention_call() -> None:
    def seen(rows: int) -> Core:
        one = core(0, "attn", 0.0, 0)
        return replace(one, shape=(2, rows, 5), seen=torch.rand(2, rows, 5) < 0.5)

    parts = [seen(4), seen(4), seen(1), seen(9)]
    whole, rest = _blocks_of_queries(replace(parts[0], shape=(2, 9, 5)), parts)
    assert whole is not None
    assert torch.equal(whole.seen, torch.cat([p.seen for p in parts[:3]], 1))  # type: ignore[misc]
    assert rest == parts[3:]
    assert _blocks_of_queries(replace(parts[0], shape=(2, 7, 5)), parts) == (None, parts)


def test_two_towers_in_one_stack_are_wrong() -> None:
    towers = [("visual.0", 0.0), ("visual.1", 0.4), ("text.0", 0.7), ("text.1", 1.0)]
    cores = [
        core(i, site, depth, 0b0001 if i == 1 else 0b0100 if i == 3 else 0)
        for i, (site, depth) in enumerate(towers)
    ]
    assert depth_finding(cores).outcome == "WRONG"


REPORT = """dampen: DropPath on Model, 4 layers
  blocks.0  DropPath(rate=0.4)  [attention untouched]
  blocks.1  DropPath(rate=0.4)  [attention untouched]
  blocks.2  -  [attention untouched]
  blocks.10  DropHead(rate=0.5, one head: nothing to drop)  [fused]
  (left out)  pool.attn: not chosen
"""
REACHED = {"blocks.0", "blocks.1"}


@pytest.mark.parametrize(
    ("line", "module", "is_said"),
    [
        ("", "pool.attn.proj", True),  # left out by name
        ("", "blocks.2.mlp", True),  # no method in its line
        ("", "blocks.10", True),  # nothing to drop in its line
        ("", "blocks.1.mlp", False),
        ("  (partial)  DropPath: blocks in 2 of 4 layers", "blocks.11.mlp", False),  # in no layer
        (
            "  (outside)  DropPath: blocks in 4 of 4 layers, and not in stem.0-2, neck",
            "stem.1.a",
            True,
        ),
        (
            "  (outside)  DropPath: blocks in 4 of 4 layers, and not in stem.0-2, neck",
            "stem.3",
            False,
        ),
        ("  (outside)  DropHead: blocks in 4 of 4 layers, and not in stem.0-2", "stem.1", False),
        ("  (outside)  DropPath: feed-forward in 4 of 4 layers, and not in stem", "stem", False),
        ("  feed-forward in 2 of 4 layers", "neck", False),
    ],
)
def test_what_the_report_says_of_a_module(line: str, module: str, is_said: bool) -> None:
    assert said(REPORT + line, module, "DropPath", "blocks", REACHED) == is_said


@pytest.mark.parametrize(
    ("line", "is_said"),
    [
        ("DropPath: blocks in 2 of 3 layers", True),
        ("DropPath: blocks in 1 of 3 layers", False),  # another count than the probe's
        ("DropPath: blocks in 2 of 4 layers", False),
        ("DropPath: attention in 2 of 3 layers", False),  # another part
        ("DropHead: blocks in 2 of 3 layers", False),  # another method
    ],
)
def test_a_share_of_the_layers_counts_only_as_the_probe_counted_it(
    line: str, is_said: bool
) -> None:
    layers = "".join(f"  blocks.{i}  DropPath(rate=0.4)  [fused]\n" for i in range(3))
    report = f"dampen: X\n{layers}  (partial)  {line}"
    assert said(report, "blocks.2.mlp", "DropPath", "blocks", REACHED) == is_said
    assert not said(report, "blocks.1.mlp", "DropPath", "blocks", REACHED)  # its layer was reached
