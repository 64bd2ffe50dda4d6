"""The bench: statistics on synthetic timings, memory against known allocations, the papers' formulations against
independent ones, and the whole command on a tiny model. No test asserts a time."""

import dataclasses
import json
import statistics

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

import benchmarks.formulations  # noqa: F401  (registers what is timed beside our methods)
import dampen
from benchmarks import published
from benchmarks.alternatives import (
    ALTERNATIVES,
    TimmAttention,
    TorchAttention,
    replace_attention,
    wrapped,
)
from dampen.cli import build
from dampen.registry import methods
from dampen.studies.bench import (
    NOISY,
    Options,
    bench,
    find_variants,
    make_subject,
    peak_memory,
    timing,
)
from dampen.studies.bench.rows import PRESETS, targets_of
from dampen.studies.bench.run import (
    FUSED,
    UNFUSED,
    plain_step,
    regularized_step,
    remarks,
    save_chart,
)
from dampen.studies.bench.scaling import _too_much, scale_attention, scale_batch
from dampen.studies.bench.subject import Subject, attention_as, unfused
from dampen.studies.bench.timing import compare, summarize
from dampen.studies.errors import ConfigError
from dampen.studies.report import make_report, write_report
from dampen.studies.report.charts import bench_rows
from tests.oracles import attention as reference
from tests.oracles import skips as reference_skip
from tests.oracles import stochastic as reference_stochastic

TINY = "vit(image_size=8, patch_size=2, width=16, depth=2, heads=2, mlp=16)"


# --- timing ---------------------------------------------------------------------------------------


class Machine:
    """A clock that the calls themselves move, by synthetic times; a slow drift disturbs all of them."""

    def __init__(self, seconds, drift=lambda now: 1.0):
        self.now, self.seconds, self.drift, self.calls = 0.0, seconds, drift, []

    def variants(self):
        return {name: (lambda name=name: self.run(name)) for name in self.seconds}

    def run(self, name):
        self.calls.append(name)
        self.now += self.seconds[name] * self.drift(self.now)

    def clock(self):
        return self.now


def test_ratios_are_medians_of_paired_times():
    pairs = {
        "plain": [(t, {"plain": t}) for t in (1.0, 2.0, 4.0)],
        "other": [(1.5, {"plain": 1.0}), (2.2, {"plain": 2.0}), (4.8, {"plain": 4.0})],
    }
    found = summarize(pairs, ["plain"])
    assert found["other"].median == pytest.approx(1.2)  # of 1.5, 1.1, 1.2
    assert (found["other"].low, found["other"].high) == pytest.approx((1.1, 1.5))
    assert (found["plain"].median, found["plain"].width) == (1.0, 0.0)
    assert found["other"].seconds == 1.5


def test_pairing_cancels_a_drifting_machine():
    machine = Machine({"plain": 1.0, "other": 1.25}, drift=lambda now: 1 + now / 200)
    found = compare(machine.variants(), "plain", rounds=30, clock=machine.clock)
    assert found["other"].median == pytest.approx(1.25, rel=0.01)
    assert found["other"].width < NOISY


def test_the_best_reference_counts():
    machine = Machine({"fused": 2.0, "unfused": 1.0, "other": 3.0})
    found = compare(machine.variants(), ("fused", "unfused"), rounds=5, clock=machine.clock)
    assert {name: r.median for name, r in found.items()} == {
        "fused": 2.0,
        "unfused": 1.0,
        "other": 3.0,
    }


def test_two_variants_are_compared_round_by_round_whatever_the_machine_does_between():
    machine = Machine({"plain": 1.0, "ours": 1.2, "theirs": 2.4}, drift=lambda now: 1 + now / 50)
    timings = timing.time_rounds(
        machine.variants(), "plain", rounds=21, every=1, clock=machine.clock
    )
    assert timings.between("ours", "theirs").median == pytest.approx(0.5, rel=0.02)
    assert timings.between("theirs", "plain").median == timings.ratios()["theirs"].median


def test_a_long_round_times_the_reference_among_every_few_variants():
    machine = Machine({"plain": 1.0, **{f"v{i}": 1.0 + i for i in range(10)}})
    found = compare(machine.variants(), "plain", rounds=7, every=3, clock=machine.clock)
    assert machine.calls.count("plain") == 1 + 7 * 4
    assert all(machine.calls.count(f"v{i}") == 1 + 7 for i in range(10))
    assert [found[f"v{i}"].median for i in range(10)] == pytest.approx([1.0 + i for i in range(10)])
    assert found["v3"].rounds == 7
    # between two references there are never more than two groups' variants, here 3 + 3
    gaps = [
        len(part)
        for part in "".join("p" if c == "plain" else "v" for c in machine.calls[11:]).split("p")
    ]
    assert max(gaps) <= 6


def test_rounds_end_when_all_intervals_are_narrow():
    machine = Machine({"plain": 1.0, "other": 1.1})
    assert (
        compare(machine.variants(), "plain", rounds=50, enough=0.03, clock=machine.clock)[
            "other"
        ].rounds
        == 20
    )
    assert (
        compare(machine.variants(), "plain", rounds=50, clock=machine.clock)["other"].rounds == 50
    )
    noisy = Machine({"plain": 1.0, "other": 1.1}, drift=lambda now: 1 + (now * 7.3 % 1))
    assert (
        compare(noisy.variants(), "plain", rounds=30, enough=0.03, clock=noisy.clock)[
            "other"
        ].rounds
        == 30
    )


def test_rounds_go_to_the_variants_of_which_least_is_known():
    restless = iter(range(10**6))
    machine = Machine({"plain": 1.0, "steady": 1.1, "restless": 1.2})
    steady = machine.run
    machine.run = lambda name: (
        steady(name)
        or setattr(
            machine,
            "now",
            machine.now + (0.5 * (next(restless) % 2) if name == "restless" else 0.0),
        )
    )
    found = compare(
        machine.variants(), "plain", rounds=30, enough=0.03, sure=7, clock=machine.clock
    )
    assert (found["steady"].rounds, found["restless"].rounds) == (7, 30)
    assert found["steady"].median == pytest.approx(1.1)


def test_a_reference_that_is_surely_slower_becomes_a_variant():
    """Timed in every group of the first five rounds, then once in a round."""
    machine = Machine({"fused": 1.0, "unfused": 2.0, "other": 3.0, "more": 4.0})
    found = compare(
        machine.variants(), ("unfused", "fused"), rounds=20, every=1, clock=machine.clock
    )
    assert (found["unfused"].rounds, found["fused"].rounds, found["other"].rounds) == (25, 55, 20)
    del found["more"]
    assert {name: r.median for name, r in found.items()} == {
        "fused": 1.0,
        "unfused": 2.0,
        "other": 3.0,
    }


def test_time_limit_and_least_rounds():
    machine = Machine({"plain": 1.0, "other": 1.1}, drift=lambda now: 1 + (now * 7.3 % 1))
    assert (
        compare(machine.variants(), "plain", rounds=50, seconds=0.0, clock=machine.clock)[
            "other"
        ].rounds
        == 5
    )
    found = compare(
        machine.variants(), "plain", rounds=50, seconds=0.0, least=2, clock=machine.clock
    )
    assert found["other"].rounds == 2


def test_progress_is_told():
    machine, told = Machine({"plain": 1.0}), []
    compare(
        machine.variants(), "plain", rounds=3, least=3, clock=machine.clock, progress=told.append
    )
    assert told == [1, 2, 3]


@pytest.mark.parametrize("n", [5, 9, 15, 25, 40])
def test_interval_covers_the_median_as_often_as_it_says(n):
    """Checked by drawing: skewed synthetic ratios with median 1."""
    draw = torch.Generator().manual_seed(n)
    low, high = timing._interval(n)
    samples = torch.randn(20_000, n, generator=draw).exp().sort(dim=1).values
    covered = ((samples[:, low] <= 1) & (samples[:, high] >= 1)).float().mean().item()
    assert covered >= 0.93 if n == 5 else covered >= 0.945
    inner = ((samples[:, low + 1] <= 1) & (samples[:, high - 1] >= 1)).float().mean().item()
    assert inner < 0.96  # no needlessly wide interval


# --- memory ---------------------------------------------------------------------------------------


def test_peak_memory_counts_what_lives_at_once():
    def run():
        a = torch.zeros(1000, 1000)  # 4 MB
        b = torch.zeros(500, 1000)  # 2 MB beside it
        del a
        c = torch.zeros(250, 1000)  # 1 MB, after the first is gone
        return b, c

    assert peak_memory(run) == pytest.approx(6_000_000, rel=0.001)


def test_peak_memory_ignores_what_was_there_before():
    before = torch.zeros(1000, 1000)
    assert peak_memory(lambda: before.add_(1)) < 10_000
    assert peak_memory(lambda: before + 1) == pytest.approx(4_000_000, rel=0.001)


def test_peak_memory_sees_the_backward_pass():
    x = torch.ones(1000, 1000, requires_grad=True)

    def run():
        torch.autograd.grad(
            x.exp().sum(), x
        )  # keeps exp(x), then makes the gradient of the sum, expanded, times it

    assert peak_memory(run) == pytest.approx(8_000_000, rel=0.01)


# --- what is benched ------------------------------------------------------------------------------


def test_every_method_has_a_row_under_its_registry_name():
    names = [v.name for v in find_variants()]
    assert len(names) == len(set(names))
    assert set(methods()) <= set(names)
    special = {
        "drop_key": ("column", "block", "cross"),
        "explicit_dropout": ("all terms", "exact", "all terms, exact"),
    }
    special |= {
        "token_graying": ("svd",),
        "consistency": ("upper half",),
        "hard_masking": ("zero",),
    }
    assert {f"{method} {what}" for method, kinds in special.items() for what in kinds} <= set(names)


def test_variants_can_be_written_out():
    found = find_variants("drop_path, drop_key(rate=0.3), drop_head + drop_path")
    assert [v.name for v in found] == ["drop_path", "drop_key(rate=0.3)", "drop_head + drop_path"]
    with pytest.raises(ConfigError, match="did you mean 'drop_key'"):
        find_variants("drop_kex")
    with pytest.raises(ConfigError, match="ratee"):
        find_variants("drop_key(ratee=0.3)")


def test_a_two_pass_method_on_the_upper_half_runs_the_lower_half_once():
    subject = make_subject(
        "vit(image_size=8, patch_size=4, width=16, depth=4, heads=2, mlp=16)", batch=2
    )
    ran = []

    class Counted(nn.GELU):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def forward(self, x):
            ran.append(self.name)
            return super().forward(x)

    for i, name in ((0, "lower"), (3, "upper")):
        subject.model.blocks[i].mlp.act = Counted(name)
    upper = next(v for v in find_variants("consistency") if v.upper)
    regularized_step(subject, upper)()
    assert sorted(ran) == ["lower", "upper", "upper"]


def test_copies_share_their_weights_and_change_nothing():
    subject = make_subject(TINY, batch=2)
    before = {k: v.clone() for k, v in subject.model.state_dict().items()}
    copy = subject.copy()
    assert all(a is b for a, b in zip(copy.parameters(), subject.model.parameters(), strict=True))
    assert copy.blocks[0] is not subject.model.blocks[0]
    dampen.regularize(copy, dampen.DropKey(0.1))
    assert type(subject.model.blocks[0].attn).__name__ == "SelfAttention"
    for step in (plain_step(subject), plain_step(subject, fused=False)):
        step()
    assert all(p.grad is None for p in subject.model.parameters())
    torch.testing.assert_close(subject.model.state_dict(), before)


@pytest.mark.parametrize(
    "model", ["encoder", "language", "timm/vit_tiny_patch16_224(img_size=32, depth=1)"]
)
def test_other_models_get_a_batch_that_fits(model):
    subject = make_subject(model, batch=2)
    plain_step(subject)()
    with attention_seen() as seen:
        subject.model(*subject.inputs)
    assert seen


BUILDERS = """
import torch
from torch import nn

class Scorer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.block = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, 3)

    def forward(self, x, scale):
        return {"scores": self.head(self.block(x)) * scale}

def by_name(batch, width=8):
    return Scorer(width), {"x": torch.randn(batch, 5, width), "scale": torch.ones(())}

def alone():
    return Scorer(8)
"""


def test_a_function_of_ones_own_gives_model_and_inputs(tmp_path):
    (tmp_path / "mine.py").write_text(BUILDERS)
    subject = make_subject(f"{tmp_path}/mine.py:by_name(width=16)", batch=3)
    assert subject.inputs[0].shape == (3, 5, 16)
    plain_step(subject)()
    output = subject.model(*subject.inputs)
    torch.testing.assert_close(subject.loss(output), output["scores"].square().mean())
    with pytest.raises(ConfigError, match=r"alone must return \(model, inputs\), got Scorer"):
        make_subject(f"{tmp_path}/mine.py:alone")


def test_a_saved_model_is_built_from_its_config(tmp_path):
    from transformers import BertConfig

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=20, intermediate_size=16, max_position_embeddings=6, **sizes)
    config.architectures = ["BertForSequenceClassification"]
    config.save_pretrained(tmp_path)
    subject = make_subject(f"hf/{tmp_path}", batch=3)
    assert subject.inputs[0].shape == (3, 6)
    assert subject.model(*subject.inputs).logits.shape == (3, 2)
    assert make_subject(f"hf/{tmp_path}(tokens=4)", batch=3).inputs[0].shape == (3, 4)
    with pytest.raises(ConfigError, match="holds no config.json"):
        make_subject(f"hf/{tmp_path}/missing")


class attention_seen:
    def __enter__(self):
        self.seen, original = [], F.scaled_dot_product_attention

        def record(*args, **kwargs):
            self.seen.append(args[0].shape)
            return original(*args, **kwargs)

        self.patch = attention_as(record)
        self.patch.__enter__()
        return self.seen

    def __exit__(self, *error):
        self.patch.__exit__(*error)


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("mae", "can be benched"),
        ("vit(depht=2)", "depth"),
        ("vit(depth=", "cannot read"),
        ("timm/vit_tinny", "timm"),
    ],
)
def test_models_that_cannot_be_built_are_config_errors(model, problem):
    with pytest.raises(ConfigError, match=problem):
        make_subject(model)


# --- the papers' formulations against independent ones --------------------------------------------


@pytest.fixture
def qkv():
    torch.manual_seed(0)
    return torch.randn(3, 2, 4, 10, 8, dtype=torch.float64).unbind(0)


def test_unfused_attention_is_attention(qkv):
    q, k, v = qkv
    plain = unfused()
    mask = torch.rand(2, 1, 10, 10) > 0.3
    mask[..., 0] = True
    bias = torch.randn(10, 10, dtype=torch.float64)
    for kwargs in (
        {},
        {"is_causal": True},
        {"attn_mask": mask},
        {"attn_mask": bias},
        {"scale": 0.7},
    ):
        torch.testing.assert_close(
            plain(q, k, v, **kwargs), F.scaled_dot_product_attention(q, k, v, **kwargs)
        )
    grouped = F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True)
    torch.testing.assert_close(plain(q, k[:, :2], v[:, :2], enable_gqa=True), grouped)


def test_published_drop_key_is_the_reference(qkv):
    q, k, v = qkv
    torch.manual_seed(1)
    ours = published.drop_key(0.3)(q, k, v)
    torch.manual_seed(1)
    hidden = torch.bernoulli(torch.ones(2, 4, 10, 10, dtype=torch.float64) * 0.3).bool()
    assert not hidden.all(-1).any()
    torch.testing.assert_close(ours, reference.drop_key(q, k, v, hidden))


def test_published_drop_attention_is_the_reference(qkv):
    q, k, v = qkv
    torch.manual_seed(1)
    ours = published.drop_attention(0.3)(q, k, v)
    torch.manual_seed(1)
    kept = torch.bernoulli(torch.full((2, 4, 10, 10), 0.7, dtype=torch.float64)).bool()
    torch.testing.assert_close(ours, reference.drop_attention(q, k, v, ~kept))


def test_published_hard_masking_and_blur_are_the_reference(qkv):
    q, k, v = qkv
    s = reference.scores(q, k)
    torch.manual_seed(1)
    ours = published.hard_masking(0.5, top=0.2)(q, k, v)
    torch.manual_seed(1)
    torch.testing.assert_close(ours, reference_stochastic.hard_masking(s, v, 0.5, 2))
    blurred = reference_stochastic.blurred_attention(s, v, sigma=1.0, width=5)
    torch.testing.assert_close(
        published.blurred_attention(5, 1.0)(q, k, v), blurred, rtol=1e-5, atol=1e-6
    )


def test_published_traces_equal_explicit_dropout():
    """The trace form is the norm form of ours, up to biases (zero here), the number of heads and the reduction."""
    torch.manual_seed(0)
    model = (
        dampen.models.ViT(image_size=8, patch_size=4, width=16, depth=2, heads=2, mlp=16)
        .double()
        .train()
    )
    x = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    for terms, weights in (("v", {"value": 1.0}), ("q", {"query": 1.0, "heads": "concat"})):
        subject = nn.ModuleList([model]).requires_grad_(True)[0]
        collect = published.trace_penalties(subject, terms, p=0.2)
        subject(x)
        theirs = collect()
        for module in published.fused_attentions(subject).values():
            module._forward_hooks.clear()
        reg = dampen.regularize(
            subject, dampen.ExplicitDropout(**weights, rate=0.2, reduction="sum")
        )
        subject(x)
        torch.testing.assert_close(theirs, reg.penalty())
        reg.remove()


def test_published_graying_is_the_reference():
    from dampen.functional.grid import patchify

    images = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    grayed = published.gray_svd(images, (4, 4), eps=0.7)
    torch.testing.assert_close(
        patchify(grayed, 4), reference_skip.gray_svd(patchify(images, 4), 0.7)
    )


def test_two_passes_cost_a_symmetric_divergence():
    first, second = torch.randn(2, 5, 4).unbind(0)
    there, back = (
        reference_stochastic.divergence(a, b) for a, b in ((first, second), (second, first))
    )
    assert published._symmetric_divergence(first, second).item() == pytest.approx(
        0.5 * (there + back), rel=1e-5
    )


def test_what_one_would_pick_instead_computes_the_same_without_dropout():
    subject = make_subject(TINY, batch=2)
    expected = subject.model.eval()(*subject.inputs)
    for make in (
        lambda m: TimmAttention(m, 0.0, fused=True),
        lambda m: TimmAttention(m, 0.0, fused=False),
        lambda m: TorchAttention(m, 0.0),
    ):
        model = subject.copy().train()
        replace_attention(model, make)
        torch.testing.assert_close(model(*subject.inputs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ALTERNATIVES)
def test_what_one_would_write_instead_is_random(name, monkeypatch):
    subject, found = make_subject(TINY, batch=2), []
    monkeypatch.setattr(Subject, "step", lambda self, losses: lambda: found.append(losses()))
    step = ALTERNATIVES[name].build(subject)
    torch.manual_seed(0)
    step(), step()
    assert not torch.equal(*found)
    torch.manual_seed(0)
    step()
    assert torch.equal(found[0], found[2])


def test_what_has_no_such_modules_is_not_wrapped():
    with pytest.raises(
        ValueError, match="written for modules with fc3, which this model does not have"
    ):
        wrapped(("fc3",), lambda m: m)(make_subject(TINY, batch=1))


def test_replaced_attention_drops():
    subject = make_subject(TINY, batch=2)
    for make in (lambda m: TimmAttention(m, 0.5, fused=True), lambda m: TorchAttention(m, 0.5)):
        model = subject.copy()
        replace_attention(model, make)
        assert not torch.equal(model(*subject.inputs), model(*subject.inputs))


class Separate(torch.nn.Module):
    """One block with separate projections."""

    def __init__(self):
        super().__init__()
        self.attn = dampen.models.SeparateAttention(8, 2)


def test_what_is_more_than_plain_attention_is_not_replaced():
    with pytest.raises(ValueError, match="more than plain self-attention"):
        replace_attention(make_subject("language", batch=1).model, lambda m: TorchAttention(m, 0.1))
    with pytest.raises(ValueError, match="fused qkv"):
        replace_attention(Separate(), lambda m: TorchAttention(m, 0.1))


# --- the whole ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def record():
    told = []
    found = bench(Options(model=TINY, batch=2, rounds=2), lambda *at: told.append(at))
    assert ("rounds", 2, 2) in told
    return json.loads(json.dumps(found, allow_nan=False))  # plain data, all of it


@pytest.mark.slow
def test_a_record_has_every_method_with_its_statistics(record):
    on_any_model = {n for n, c in methods().items() if not c.needs_adapters}
    assert on_any_model <= set(record["ratios"])
    for entry in [
        *record["ratios"].values(),
        *record["papers"].values(),
        *record["alternatives"].values(),
    ]:
        assert entry["low"] <= entry["median"] <= entry["high"]
        assert entry["rounds"] == 2
        assert entry["seconds"] > 0
        assert isinstance(entry["noisy"], bool)
    assert record["plain"]["best"] in (FUSED, UNFUSED)
    best = record["plain"][record["plain"]["best"]]
    assert (best["low"], best["median"], best["high"]) == (1.0, 1.0, 1.0)
    assert record["memory"][record["plain"]["best"]]["ratio"] == 1.0
    assert set(record["memory"]) == {
        *record["ratios"],
        *record["papers"],
        *record["alternatives"],
        FUSED,
        UNFUSED,
    }
    assert {p["ours"] for p in record["papers"].values()} <= set(record["ratios"])
    assert set(record["skipped"]) == {
        "blurred_attention grid",  # 8 x 8 patches, this model has 4 x 4
        "lora_dropout",  # the model has no adapters
    }
    assert record["targets"] == {}  # which are for DESIGN's model alone
    assert {"cpu", "threads", "torch", "date"} <= set(record["machine"])
    assert "--rounds 2" in record["command"]


@pytest.mark.slow
def test_memory_of_a_step_tells_methods_apart(record):
    memory = {name: entry["ratio"] for name, entry in record["memory"].items()}
    assert memory["patch_dropout"] < 0.9  # half the tokens
    assert memory["r_drop"] > 1.5 * memory["drop_key"]  # two passes
    assert memory["r_drop upper half"] < memory["r_drop"]


@pytest.mark.slow
def test_a_record_becomes_docs_remarks_and_a_chart(record, tmp_path):
    from benchmarks.method_cards import cost

    assert (
        cost("drop_key", record)
        == f"{record['ratios']['drop_key']['median']:.2f}x ["
        + ", ".join(f"{record['ratios']['drop_key'][k]:.2f}" for k in ("low", "high"))
        + "]"
    )
    rows = bench_rows(record)
    assert {r["kind"] for r in rows} == {"dampen", "as published", "timm, torch.nn"}
    save_chart(record, tmp_path / "chart.svg")
    drawn = (tmp_path / "chart.svg").read_text()
    assert drawn.startswith("<svg")
    assert "drop_key block" in drawn
    assert any("Not benched: blurred_attention grid" in line for line in remarks(record))


@pytest.mark.slow
def test_a_record_becomes_a_page_alone_and_beside_runs(record, tmp_path):
    from tests.studies.synthetic_runs import write_study

    (tmp_path / "bench.json").write_text(json.dumps(record))
    write_report([tmp_path / "bench.json"], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert '<h1 id="b1-title">Cost of each method</h1>' in page
    assert "drop_key block" in page
    write_study(tmp_path / "runs")
    report = make_report([tmp_path / "runs", tmp_path / "bench.json"])
    assert '<h2 id="b1-title">Cost of each method</h2>' in report.render()
    assert (
        f"| drop\\_key block | dampen | {record['ratios']['drop_key block']['median']:.3f}x |"
        in report.render("md")
    )


def test_noise_is_said():
    quiet = {"ratios": {"a": {}}, "papers": {}, "alternatives": {}, "skipped": {}, "noisy": []}
    quiet["machine"] = {"cpu": "synthetic", "threads": 1, "torch": "2", "clock": "wall"}
    assert not any("Too noisy" in line for line in remarks(quiet))
    (line,) = [s for s in remarks({**quiet, "noisy": ["a"]}) if "Too noisy" in s]
    assert "1 of 2 intervals are wider than 3 %" in line


def test_width_decides_what_is_noisy():
    noisy = timing.Ratio(1.0, 0.98, 1.02, 9, 0.1)
    assert noisy.width > NOISY
    assert timing.Ratio(1.0, 0.99, 1.015, 9, 0.1).width <= NOISY


# --- scaling --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_attention_over_its_length():
    options = Options(seconds=600.0)
    chosen = find_variants("drop_key, explicit_dropout(query=0.1, value=0.1), drop_path")
    found = scale_attention(chosen, options, lambda *a: None, lengths=(32, 64))
    rows = {(p["row"], p["n"]): p for p in found["points"]}
    explicit = "explicit_dropout(query=0.1, value=0.1)"
    assert {n for name, n in rows if name == "drop_key"} == {32, 64}
    assert rows["plain SDPA", 64]["memory_ratio"] == 1.0
    assert rows[explicit, 64]["against"] == "plain block"
    assert rows["drop_key, as published", 64]["memory_ratio"] > 1
    assert found["stopped"] == {"drop_path": "does nothing inside attention"}


def test_series_end_with_a_reason(monkeypatch):
    from dampen.studies.bench import scaling

    def point(n, size, seconds):
        return {"n": n, "bytes": size, "seconds": seconds, "against": "plain"}

    monkeypatch.setattr(scaling, "available_memory", lambda: 8 * 2**30)
    found = {
        "plain": [point(128, 1000, 0.3)],
        "square": [point(64, 2**28, 0.1), point(128, 2**30, 0.1)],
        "linear": [point(64, 2**29, 0.1), point(128, 2**30, 0.1)],
        "slow": [point(128, 1000, 10.0)],
        "gone": [point(64, 2**40, 100.0)],
        "new": [],
    }
    reasons = _too_much(found, {"gone": "before"}, 256, left=100.0)
    assert set(reasons) == {"slow"}  # square takes 4 GiB, just half of what is free
    assert "40.0 s per call" in reasons["slow"]
    assert (
        len(_too_much(found, {"gone": "before"}, 256, left=11.0)) == 2
    )  # plain and one of the quick ones stay
    monkeypatch.setattr(scaling, "available_memory", lambda: 7 * 2**30)
    reasons = _too_much(found, {"gone": "before"}, 256, left=1e9)
    assert set(reasons) == {"square"}
    assert "about 4.0 GiB" in reasons["square"]
    nothing = _too_much(found, {}, 256, left=0.0)
    assert set(nothing) == {"plain", "square", "linear", "slow", "gone"}
    assert nothing["plain"] == "ends before n = 256: no method is left to compare with it"


@pytest.mark.slow
def test_steps_over_the_batch():
    options = Options(model=TINY, seconds=600.0)
    found = scale_batch(find_variants("drop_key"), options, lambda *a: None, batches=(1, 2))
    assert {(p["row"], p["batch"]) for p in found["points"]} == {
        (name, b) for name in (FUSED, UNFUSED, "drop_key") for b in (1, 2)
    }
    assert found["stopped"] == ""
    short = Options(model=TINY, seconds=0.0)
    ended = scale_batch(find_variants("drop_key"), short, lambda *a: None, batches=(1, 2))
    assert "ends before batch 2" in ended["stopped"]


def test_a_row_that_cannot_run_at_a_length_is_left_out_there_and_nothing_is_lost():
    options = Options(model=TINY, seconds=60.0)
    found = scale_attention(
        find_variants("blurred_attention"), options, lambda *a: None, lengths=(64, 100)
    )
    assert [p["n"] for p in found["points"] if p["row"] == "blurred_attention"] == [64, 100]
    assert [p["n"] for p in found["points"] if p["row"] == "blurred_attention grid"] == [64]
    assert found["stopped"]["blurred_attention grid"].startswith(
        "left out: n = 100 (grid (8, 8) has 64 patches"
    )


# --- the command ----------------------------------------------------------------------------------


def test_command_prints_a_table_and_writes_the_record(tmp_path):
    path = tmp_path / "bench.json"
    arguments = [
        "bench",
        "--model",
        TINY,
        "--batch",
        "2",
        "--rounds",
        "1",
        "--methods",
        "drop_path, drop_key",
    ]
    done = CliRunner().invoke(build("bench"), [*arguments, "-o", str(path)])
    assert done.exit_code == 0, done.output
    assert "drop_key cross" in done.output
    found = json.loads(path.read_text())
    assert set(found["ratios"]) == {
        "drop_path",
        "drop_key",
        "drop_key column",
        "drop_key block",
        "drop_key cross",
    }
    assert list(found["papers"]) == ["DropKey, algorithm 1"]
    assert statistics.median([found["ratios"]["drop_key"]["median"]]) > 0
    assert found["papers"]["DropKey, algorithm 1"]["ours_over_it"]["median"] > 0
    printed = CliRunner().invoke(build("bench"), [*arguments, "--json"])
    assert set(json.loads(printed.stdout)["ratios"]) == set(found["ratios"])


def test_command_explains_what_is_wrong():
    for arguments, told in (
        (["--methods", "drop_kex"], "did you mean 'drop_key'"),
        (["--dtype", "float8"], "use float32"),
        (["--clock", "sun"], "use wall or cpu"),
    ):
        done = CliRunner().invoke(build("bench"), ["bench", *arguments])
        assert done.exit_code == 2
        assert told in done.output


def test_a_device_that_is_not_there_is_refused_in_words():
    with pytest.raises(ConfigError, match="--device: cannot use 'cuda:7' here: .*; use cpu"):
        make_subject(TINY, 2, device="cuda:7")


def test_sizes_bring_rows_targets_and_their_own_command():
    options = Options.preset("tiny", rounds=3)
    assert (options.batch, options.threads, options.clock) == (32, 1, "cpu")
    assert options.command() == "dampen bench --rounds 3 --size tiny"
    assert targets_of("tiny", native=False)["hard_masking"] == 1.25
    assert "hard_masking" not in targets_of("long", native=False)  # it has none by torch alone
    rows = {v.name for v in find_variants(options.methods)}
    assert set(targets_of("tiny", native=True)) <= rows
    assert set(targets_of("mid", native=True)) <= {
        v.name for v in find_variants(PRESETS["mid"].methods)
    }
    with pytest.raises(ConfigError, match="tiny, small, mid, long"):
        Options.preset("huge")


def test_attention_alone_is_compared_with_its_targets(monkeypatch):
    monkeypatch.setitem(PRESETS, "long", dataclasses.replace(PRESETS["long"], lengths=(64,)))
    record = bench(Options.preset("long", methods="drop_key(rate=0.1)", seconds=0.0))
    assert {p["n"] for p in record["scaling"]["points"]} == {64}
    assert list(record["targets"]) == ["drop_key(rate=0.1)"]
    assert {p["rounds"] for p in record["scaling"]["points"]} == {5}  # whatever the time


def test_a_size_has_the_usual_rows_and_at_least_five_rounds_of_what_fits():
    methods = "drop_key, drop_path(rate=0.1)"
    record = bench(Options.preset("tiny", methods=methods, rounds=5))
    assert set(record["ratios"]) == {"drop_key", "drop_path(rate=0.1)"}
    assert record["papers"] == record["memory"] == {}
    short = bench(Options.preset("tiny", methods=methods, rounds=1000, seconds=0.0))
    assert {name: entry["rounds"] for name, entry in short["ratios"].items()} == {"drop_key": 5}
    assert list(short["skipped"]) == ["drop_path(rate=0.1)"]
