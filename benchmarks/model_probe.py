"""An independent witness of what regularizers do inside a model.

Nothing here imports how dampen finds attention. `operation_record` records two forwards of the plain model below every
Python call, `model_facts` reads off the record what the model is made of. Then each method runs in the same model,
recorded in the same way, and the two records are compared: which cores and
linear calls it reached, how many keys it hid, which it showed that the model hides, what its penalty should be.

A method *works*, is *refused* (dampen raised and said why), does *not apply* (the plain model has nothing of the kind),
is *unchecked* (it acts, but the probe does not know what it should give), or is WRONG (other numbers than the
definition), SILENT (a part was left out and the printed report does not say so) or CRASH (an error that is no
refusal)."""

from __future__ import annotations

import contextlib
import math
import re
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import dampen
from benchmarks.model_facts import learn, residual_branches
from benchmarks.operation_record import MOST_HEADS, Core, Linear, Trace, record
from dampen.native import available as native_available

VERSION = 11  # raise it where a judgement changes: the sweep then runs again
RATE = 0.2  # of the penalties
WORST = 5.5  # standard errors
CHECKS = ("depth", "masks")  # no methods: their refusals are those of the methods


@dataclass
class Finding:
    """What came of one method on one model."""

    outcome: str
    why: str = ""
    reached: int = 0
    total: int = 0

    def to_json(self) -> dict[str, Any]:
        short = {"outcome": self.outcome}
        if self.why:
            short["why"] = self.why[:900]
        return short | ({"reached": self.reached, "total": self.total} if self.total else {})


class Refused(Exception):
    """dampen raised, and said why."""


Make = Callable[[], Any]
METHODS: dict[str, Make] = {
    "DropKey": lambda: dampen.DropKey(0.4),
    "HardMasking": lambda: dampen.HardMasking(0.5, top=0.5),
    "DropHead": lambda: dampen.DropHead(0.5),
    "DropPath": lambda: dampen.DropPath(0.9),
    "FeedForwardDropout": lambda: dampen.FeedForwardDropout(0.5),
    "ExplicitDropout(value)": lambda: dampen.ExplicitDropout(value=1.0, rate=RATE),
    "ExplicitDropout(ffn)": lambda: dampen.ExplicitDropout(ffn=1.0, rate=RATE),
    "depth": lambda: _recorder(),
    "masks": lambda: dampen.DropKey(0.5),
}


class Probe:
    """All judgements on one model."""

    def __init__(
        self, model: nn.Module, inputs: dict[str, Any], methods: dict[str, Make] | None = None
    ) -> None:
        if native_available():
            raise RuntimeError(
                "Native kernels hide keys inside one operation, which leaves no record: set DAMPEN_NATIVE=0."
            )
        self.model, self.inputs = model, inputs
        self.methods = METHODS | (methods or {})
        self.state = {k: v.detach().clone() for k, v in model.state_dict().items()}
        self.classes = {n: type(m) for n, m in model.named_modules()}
        self.facts = learn(model, inputs)
        self.reached_ff: set[str] = set()
        self.report = ""
        self._restore()
        self.plain_eval, self.plain_train = self._eval(), self._train()
        self.plain_gradients_finite = self._unbounded(0.0) == []
        self.steady = torch.equal(self.plain_train, self._train(seed=2))

    def _restore(self) -> None:
        self.model.load_state_dict(self.state)
        self.model.zero_grad()

    def _eval(self) -> Tensor:
        torch.manual_seed(1)
        with torch.no_grad():
            out = floats(self.model.eval()(**self.inputs))
        self._restore()
        return out

    def _train(self, seed: int = 1) -> Tensor:
        torch.manual_seed(seed)
        with torch.no_grad():
            out = floats(self.model.train()(**self.inputs))
        self._restore()
        return out

    def run(self, only: tuple[str, ...] = ()) -> dict[str, Finding]:
        """Every method's finding."""
        judges: dict[str, Callable[[str], Finding]] = {
            "DropKey": self._drop_key, "HardMasking": self._hard, "DropHead": self._drop_head,
            "DropPath": self._drop_path, "FeedForwardDropout": self._ff_dropout,
            "ExplicitDropout(value)": self._value, "ExplicitDropout(ffn)": self._ffn, "depth": self._depth,
            "masks": self._masks,
        }  # fmt: skip
        return {
            name: self._judged(name, judge)
            for name, judge in judges.items()
            if not only or name in only
        }

    def _judged(self, name: str, judge: Callable[[str], Finding]) -> Finding:
        try:
            return judge(name)
        except Refused as error:
            if name == "DropHead" and self._has_one_head():
                return Finding("not applicable", "every attention has one head")
            return Finding("refused" if name not in CHECKS else "not applicable", str(error))
        except Wrong as error:
            return Finding("WRONG", str(error))
        except (TimeoutError, MemoryError):
            raise
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            path = "/".join(where.filename.split("/")[-3:])
            return Finding(
                "CRASH", f"{type(error).__name__}: {str(error)[:300]} (at {path}:{where.lineno})"
            )
        finally:
            self._clean()

    def _has_one_head(self) -> bool:
        """Whether no attention has more rows of scores than samples, so that each has one head (or none is known)."""
        return bool(self.facts.token_cores) and all(
            c.shape[0] <= self.samples for c in self.facts.token_cores
        )

    @property
    def samples(self) -> int:
        """The samples of a batch: the first axis of the smallest input (patches may be laid in a row)."""
        tensors = [
            t for t in pytree.tree_leaves(self.inputs) if isinstance(t, Tensor) and t.ndim > 1
        ]
        return min((len(t) for t in tensors), default=0)

    def _clean(self) -> None:
        if {n: type(m) for n, m in self.model.named_modules()} != self.classes:
            reg = getattr(self, "_reg", None)
            if reg is not None:
                with contextlib.suppress(Exception):
                    reg.remove()
        self._reg = None
        self._restore()

    @contextlib.contextmanager
    def _regularized(self, name: str, **kwargs: Any) -> Iterator[Any]:
        """The model with a method in it; refusals are told from crashes, and eval, keys and removal are checked."""
        with _refusals():
            self._reg = reg = dampen.regularize(self.model, self.methods[name](), **kwargs)
            if list(self.model.state_dict()) != list(self.state):
                raise Wrong("the keys of the state_dict changed")
            self._restore()
            if not same(self._eval(), self.plain_eval):
                raise Wrong("the output in eval mode is not bit-identical")
            yield reg
        self.report = str(reg)
        reg.remove()
        self._reg = None
        self._restore()
        if {n: type(m) for n, m in self.model.named_modules()} != self.classes or not same(
            self._eval(), self.plain_eval
        ):
            raise Wrong("remove() did not restore the model")

    def _gradients(self, reg: Any) -> None:
        """A training step has finite gradients, if it has them without the method."""
        bad = self._unbounded(reg.penalty) if self.plain_gradients_finite else []
        if bad:
            raise Wrong(f"gradients are not finite: {bad[:3]}")

    def _unbounded(self, penalty: Any) -> list[str]:
        """The parameters whose gradient is not finite after a training step."""
        torch.manual_seed(1)
        out = floats(self.model.train()(**self.inputs))
        loss = out.float().square().mean() + (penalty() if callable(penalty) else penalty)
        if loss.requires_grad:
            loss.backward()
        grads = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        bad = [n for n, g in grads.items() if not torch.isfinite(g).all()]
        self._restore()
        return bad

    # attention

    def _aligned(self, cores: list[Core]) -> list[tuple[Core, Core | None]]:
        """Each core of the plain model with the regularized one of the same size, in the order of execution."""
        left = list(cores)
        pairs: list[tuple[Core, Core | None]] = []
        for plain in self.facts.cores:
            at = next((i for i, c in enumerate(left) if c.shape == plain.shape), None)
            if at is None:
                whole, left = _blocks_of_queries(plain, left)
                pairs.append((plain, whole))
                continue
            pairs.append((plain, left[at]))
            left = left[at + 1 :]
        return pairs

    def _hidden(self, name: str, expected: Callable[[Tensor], Tensor], repeats: int = 2) -> Finding:
        facts = self.facts
        if not facts.token_cores:
            with contextlib.suppress(Refused), self._regularized(name):
                record(self.model, self.inputs)
                return Finding(
                    "WRONG", "acts although the probe finds no softmax attention over tokens"
                )
            return Finding("not applicable", "no softmax attention over tokens")
        hidden: Counter[int] = Counter()
        wanted: dict[int, float] = defaultdict(float)
        spread: dict[int, float] = defaultdict(float)
        leaked: dict[int, int] = Counter()
        changed_shape: list[Core] = []
        with self._regularized(name) as reg:
            self._gradients(reg)
            for seed in range(repeats):
                self._restore()
                trace, _ = record(self.model, self.inputs, seed)
                reg.penalties()
                for plain, now in self._aligned(trace.cores):
                    if now is None or now.seen is None or plain.seen is None:
                        changed_shape.append(plain)
                        continue
                    leaked[plain.index] += plain.index not in facts.own_masks and int(
                        (
                            now.seen
                            & ~facts.visible.get(plain.index, plain.seen)
                            & plain.seen.any(-1, keepdim=True)
                        ).sum()
                    )
                    many = plain.seen.sum(-1)
                    rows = (many >= 2) & (plain.distinct if name == "HardMasking" else True)
                    hide = (plain.seen & ~now.seen).sum(-1)
                    hidden[plain.index] += int(hide[rows].sum())
                    wanted[plain.index] += float(expected(many[rows].double()).sum())
                    spread[plain.index] += float(many[rows].double().sum()) * 0.25
        leaks = [f"{self._name(i)}: {n} hidden keys got weight" for i, n in leaked.items() if n]
        if leaks:
            return Finding("WRONG", "keys that the model hides are seen: " + "; ".join(leaks[:4]))
        lost = [c for c in changed_shape if c.seen is not None]
        if lost:
            return Finding(
                "WRONG",
                f"{len(lost) // repeats} of {len(facts.cores)} attention calls of the plain model have no counterpart: "
                + ", ".join(sorted({c.module for c in lost})[:4]),
            )
        missed = [c for c in facts.token_cores if not hidden[c.index] and wanted[c.index] > 8]
        touched = [c for c in facts.cores if c.index in facts.channel and hidden[c.index]]
        if touched:
            return Finding("WRONG", f"hides channels, not tokens, at {touched[0].module}")
        off = []
        for c in facts.token_cores:
            if hidden[c.index] and wanted[c.index] > 0 and c.index not in facts.own_masks:
                z = (hidden[c.index] - wanted[c.index]) / math.sqrt(spread[c.index])
                if abs(z) > WORST:
                    off.append(
                        f"{c.module}: {hidden[c.index]} keys hidden, {wanted[c.index]:.0f} expected (z {z:.1f})"
                    )
        if off:
            return Finding("WRONG", "share of hidden keys: " + "; ".join(off[:4]))
        if missed and len(missed) == len(facts.token_cores):
            return Finding("SILENT", f"no key is hidden in any of {len(missed)} attention calls")
        left = {c.index for c in missed}
        hit = {f"{c.module}#{c.index}": c.index not in left for c in facts.token_cores}
        found = self._coverage(name, "attention", hit)
        unjudged = sum(c.index in facts.own_masks for c in facts.token_cores)
        if unjudged and found.outcome == "works":
            share = f"the share of {unjudged} of {len(hit)} is not checked, their masks depend on the data"
            found.why = "; ".join(t for t in (found.why, share) if t)
            found.outcome = "unchecked" if unjudged == len(hit) else "works"
        return found

    def _name(self, index: int) -> str:
        return self.facts.trace.events[index].module

    def _coverage(self, name: str, part: str, found: dict[str, bool]) -> Finding:
        """Works where every module was reached, or `print(reg)` says which were not.

        Args:
            name: the method.
            part: what it acts on, as the report calls it.
            found: the modules that have such a part, and whether it was reached in each; a name may carry a number
                behind "#" where a module has several.
        """
        reached = {m.partition("#")[0] for m, hit in found.items() if hit}
        missed = {m.partition("#")[0] for m, hit in found.items() if not hit}
        counts = sum(found.values()), len(found)
        if not missed:
            return Finding("works", "", *counts)
        method = name.partition("(")[0]
        unsaid = sorted(m for m in missed if not said(self.report, m, method, part, reached))
        share = f"{part}: {counts[0]} of {counts[1]}"
        if not unsaid:
            return Finding("works", f"{share}, said", *counts)
        more = f" and {len(unsaid) - 5} more" if len(unsaid) > 5 else ""
        silent = f"{share} reached; print(reg) says nothing of {', '.join(unsaid[:5])}{more}"
        return Finding("SILENT", silent, *counts)

    def _drop_key(self, name: str) -> Finding:
        return self._hidden(name, lambda m: 0.4 * m - 0.4**m)

    def _hard(self, name: str) -> Finding:
        return self._hidden(name, lambda m: 0.5 * (0.5 * m).ceil())

    def _drop_head(self, name: str) -> Finding:
        facts = self.facts
        done = {c.index for c in facts.token_cores}
        after = [
            e for e in facts.trace.linears if e.sources and e.sources <= done and e.zeros < 0.05
        ]
        outs = [e for e in after if not e.ins == e.outs <= MOST_HEADS]
        if not facts.token_cores:
            return self._none_expected(name, "no softmax attention over tokens")
        zeros: dict[str, float] = defaultdict(float)
        with self._regularized(name) as reg:
            self._gradients(reg)
            for seed in range(4):
                self._restore()
                trace, _ = record(self.model, self.inputs, seed)
                for e in trace.linears:
                    zeros[e.weights[0]] = max(zeros[e.weights[0]], e.zeros)
        hit = {f"{e.module}#{e.index}": zeros[e.weights[0]] >= 0.05 for e in outs}
        if outs and not any(hit.values()) and self._has_one_head():
            return Finding("not applicable", "every attention over tokens has one head")
        if outs and not any(hit.values()):
            return Finding("SILENT", f"no head is zeroed before any of {len(outs)} projections")
        return self._coverage(name, "attention", hit)

    def _none_expected(self, name: str, why: str) -> Finding:
        try:
            with self._regularized(name) as reg:
                _out, _ = record(self.model, self.inputs)
                penalty = float(reg.penalty().detach())
        except Refused:
            return Finding("not applicable", why)
        if not same(floats(_), self.plain_train) or penalty:
            return Finding("unchecked", f"acts although the probe finds {why}")
        return Finding("SILENT", f"does nothing and says nothing ({why})")

    # linear layers

    def _ff_dropout(self, name: str) -> Finding:
        facts = self.facts
        ff = facts.feed_forward_weights
        if not ff:
            return self._none_expected(name, "no feed-forward")
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        touched: dict[str, bool] = {}
        unlike = {
            e.weights[0] for e in facts.trace.linears if e.touched
        }  # the module itself changes its input
        with self._regularized(name) as reg:
            self._gradients(reg)
            for seed in range(2):
                self._restore()
                trace, _ = record(self.model, self.inputs, seed)
                for e in trace.linears:
                    sums[e.weights[0]][0] += e.zeros * e.x.numel()
                    sums[e.weights[0]][1] += e.x.numel()
                    if e.touched is not None and e.weights[0] not in unlike:
                        touched[e.weights[0]] = touched.get(e.weights[0], False) or e.touched
        plain: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for e in facts.trace.linears:
            plain[e.weights[0]][0] += e.zeros * e.x.numel()
            plain[e.weights[0]][1] += e.x.numel()
        reached, wrong = set(), []
        for w, (zero, many) in sums.items():
            before = plain[w][0] / max(1.0, plain[w][1])
            now = zero / max(1.0, many)
            if before > 0.9 and w not in touched:
                continue
            if touched.get(w, now - before > 0.2 * (1 - before)):
                reached.add(w)
                if w in facts.attention:
                    wrong.append(w)
        if wrong:
            return Finding(
                "WRONG",
                f"acts on projections of attention: {', '.join(wrong[:4])} ({len(wrong)} in all)",
            )
        self.reached_ff = reached
        pairs = self._pairs() & reached  # a feed-forward without a residual: Aria's projector
        other = sorted(reached - ff - pairs)
        modules = {e.weights[0]: e.module for e in facts.trace.linears}
        known = {w for w in ff if w in touched or plain[w][0] <= 0.9 * plain[w][1]}
        hit = {f"{modules[w]}#{w}": w in reached for w in (ff & reached) | known}
        found = self._coverage(name, "feed-forward", hit)
        unnamed = [w for w in other if w.removesuffix(".weight") not in named(self.report)]
        if unnamed:
            return Finding(
                "WRONG",
                f"acts on {len(unnamed)} linear layers that the probe finds to be no feed-forward and that "
                f"print(reg) does not name: {', '.join(unnamed)}",
            )
        if other and found.outcome == "works":
            found.why = "; ".join(t for t in (found.why, f"also on {', '.join(other)}, said") if t)
        return found

    def _pairs(self) -> set[str]:
        """The weights of two linear layers side by side of which one reads the other alone."""
        linears = [e for e in self.facts.trace.linears if e.kind == "linear" and e.weights]
        return {
            weight
            for a in linears
            for b in linears
            if b.sources == {a.index}
            and a.outs == b.ins
            and a.module != b.module
            and a.module.rpartition(".")[0] == b.module.rpartition(".")[0] != ""
            for weight in (a.weights[0], b.weights[0])
        } - self.facts.attention

    def _drop_path(self, name: str) -> Finding:
        facts = self.facts
        if not facts.branches or not facts.cores:
            return self._none_expected(name, "no residual branch")
        hit: Counter[tuple[str, int]] = Counter()
        with self._regularized(name) as reg:
            self._gradients(reg)
            for seed in range(4):
                self._restore()
                trace, _ = record(self.model, self.inputs, seed)
                seen: Counter[str] = Counter()
                for b in residual_branches(trace):
                    hit[b.module, seen[b.module]] += any(b.samples_zero)
                    seen[b.module] += 1
        seen = Counter()
        found: dict[str, bool] = {}
        attending = {c.module for c in facts.cores}
        pending = []
        for b in facts.branches:
            key = (b.module, seen[b.module])
            seen[b.module] += 1
            if any(b.samples_zero) or (len(b.shape) == 2 and b.shape[0] == self.samples):
                continue  # one vector per sample: tokens were pooled before
            pending.append((b, bool(hit[key])))
        for i, (b, reached) in enumerate(pending):
            of_attention = any(f"{b.module}.".startswith(f"{m}.") for m in attending if m)
            if not reached and (of_attention or b.partial):
                continue  # positions inside attention, sums of groups of channels (EdgeNeXt)
            above = any(
                n.startswith(b.module + ".") or not b.module for n in layers_of(self.report)
            )
            end = facts.trace.events[min(b.last)].module
            found[f"{end if above and not reached else b.module}#{i}"] = reached
        if not found:
            return Finding("SILENT", "no residual branch is ever dropped")
        return self._coverage(name, "blocks", found)

    # penalties

    def _penalty(self, name: str, want: dict[str, float], what: str) -> Finding:
        """The penalty of one forward beside the formula, layer by layer where they differ."""
        if not want:
            return self._none_expected(name, what)
        with self._regularized(name) as reg:
            self._gradients(reg)
            self._restore()
            torch.manual_seed(1)
            self.model.train()(**self.inputs)
            got = float(reg.penalty().detach())
            layers = [layer.site.name for layer in reg.layers]
        total = sum(want.values())
        if close(got, total):
            return Finding("works", "", len(want), len(want))
        report = self.report
        missed, off = [], []
        for site in layers:
            inner = [s for s in layers if s.startswith(f"{site}.") or (s and not site)]
            mine = {m: v for m, v in want.items() if holds(site, m)}
            mine = {m: v for m, v in mine.items() if not any(holds(s, m) for s in inner)}
            try:
                with self._regularized(name, target_modules=site or "*") as reg:
                    torch.manual_seed(1)
                    self.model.train()(**self.inputs)
                    here = float(reg.penalty().detach())
            except Refused:
                self._clean()
                here = 0.0
            if mine and here == 0.0:
                missed += list(mine)
            elif not close(here, sum(mine.values())):
                part = next(
                    (m for m, v in mine.items() if close(here, sum(mine.values()) - v)), None
                )
                if part is not None:
                    missed.append(part)
                else:
                    off.append(
                        f"{site or '(model)'}: got {here:.6g}, formula {sum(mine.values()):.6g}"
                    )
            else:
                continue
        covered = {m for m in want if any(holds(s, m) for s in layers)}
        missed += [m for m in want if m not in covered]
        self.report = report
        if off:
            return Finding(
                "WRONG", "penalty: " + "; ".join(off[:3]) + f" ({len(off)} of {len(layers)} layers)"
            )
        if not missed:
            return Finding("WRONG", f"penalty: got {got:.6g}, formula {total:.6g}")
        part = "feed-forward" if "ffn" in name else "projections"
        return self._coverage(name, part, {m: m not in missed for m in want})

    def _valid(self, event: Linear) -> Tensor | None:
        """Which rows are no padding: keys that some query sees, in the attention over the same tokens."""
        near = sorted(
            self.facts.cores, key=lambda c: (abs(c.index - event.index), c.index > event.index)
        )
        for core in near:
            keys = (
                core.shape[2] if core.v is None else core.v.shape[-2]
            )  # fewer than scores where there is a sink
            if core.seen is None or core.index in self.facts.channel or event.rows % keys:
                continue
            samples = event.rows // keys
            if (
                not (self._attends_to_itself(core) or event.index in core.v_sources)
                or core.shape[0] % samples
            ):
                continue
            if core.seen.shape[0] % samples or core.seen[..., :keys].shape[-1] != keys:
                continue
            valid = core.seen[..., :keys].any(1).reshape(samples, -1, keys).any(1)
            tokens_first = event.given[:2] == (keys, samples) != (samples, keys)
            return (valid.t() if tokens_first else valid).flatten()
        return None

    def _attends_to_itself(self, core: Core) -> bool:
        """Whether queries, keys and values are projections of one tensor, to which positions may be added first."""
        events = self.facts.trace.events
        values = [events[i].sources for i in core.v_sources]
        return all(source <= events[i].sources for source in values for i in core.sources)

    def _mean(self, event: Linear, columns: Tensor | None = None) -> float:
        y = event.y if columns is None else event.y[:, columns]
        squares = y.double().square().sum(-1)
        valid = self._valid(event)
        if valid is not None and bool(valid.any()):
            squares = squares[valid]
        return 0.5 * RATE**2 * float(squares.mean())

    def _value(self, name: str) -> Finding:
        facts = self.facts
        if not facts.token_cores:
            return self._none_expected(name, "no softmax attention over tokens")
        want: dict[str, float] = defaultdict(float)
        counted = set()
        for core in facts.token_cores:
            if core.index not in facts.values:
                continue
            index, columns = facts.values[core.index]
            if (index, tuple(columns.tolist())) in counted:
                continue
            counted.add((index, tuple(columns.tolist())))
            event = facts.trace.events[index]
            assert isinstance(event, Linear)
            want[core.module] += self._mean(event, columns)
        if not want:
            with self._regularized(name) as reg:
                self._gradients(reg)
            return Finding("unchecked", "; ".join(facts.ambiguous[:2]))
        found = self._penalty(name, want, "no value projection")
        unknown = len({c.module for c in facts.token_cores if c.index not in facts.values})
        if unknown and found.outcome in ("WRONG", "SILENT"):
            return Finding(
                "unchecked", f"{unknown} value projections unknown to the probe; {found.why}"
            )
        return found

    def _ffn(self, name: str) -> Finding:
        facts = self.facts
        want: dict[str, float] = defaultdict(float)
        reached = self.reached_ff
        for event in facts.trace.linears:
            if event.index in facts.feed_forward or event.weights[0] in reached:
                want[event.module] += self._mean(event)
        if any(re.search(r"expert", w) for w in facts.feed_forward_weights):
            return self._experts(name)
        return self._penalty(name, want, "no feed-forward")

    def _experts(self, name: str) -> Finding:
        """Routed layers: the penalty is there, is said where partial, and does not depend on padding."""
        with self._regularized(name) as reg:
            self._gradients(reg)
            torch.manual_seed(1)
            self.model.train()(**self.inputs)
            got = float(reg.penalty().detach())
        routed = {
            e.module for e in self.facts.feed_forward.values() if re.search(r"expert", e.weights[0])
        }
        if not got:
            return Finding("SILENT", "no penalty in a mixture of experts")
        return Finding(
            "unchecked", f"mixture of {len(routed)} modules of experts: the value is not checked"
        )

    # depth, masks

    def _depth(self, name: str) -> Finding:
        facts = self.facts
        if not facts.token_cores:
            return Finding("not applicable", "no softmax attention over tokens")
        with self._regularized(name):
            trace = Trace(self.model)
            _Recorder.trace = trace
            torch.manual_seed(1)
            with trace.recording():
                self.model.train()(**self.inputs)
        known = [c for c in trace.cores if c.depth is not None]
        return depth_finding(known)

    def _masks(self, name: str) -> Finding:
        """Changing what a query must not see changes nothing, at model level."""
        ids_name = next((n for n in ("input_ids", "decoder_input_ids") if n in self.inputs), None)
        images = any(n.startswith(("pixel", "image")) for n in self.inputs)
        if ids_name is None or images or not self.steady or not self.facts.token_cores:
            return Finding("not applicable", "no token ids, or randomness of its own")
        ids = self.inputs[ids_name]
        if ids.ndim != 2:
            return Finding("not applicable", "ids are not (batch, length)")
        checks: dict[str, tuple[dict[str, Any], Tensor]] = {}
        future = ids.clone()
        future[:, -1] = torch.where(ids[:, -1] == 5, 6, 5)
        earlier = torch.ones_like(ids, dtype=torch.bool)
        earlier[:, -1] = False
        checks["future"] = {**self.inputs, ids_name: future}, earlier
        mask = self.inputs.get("attention_mask")
        if (
            ids_name == "input_ids"
            and isinstance(mask, Tensor)
            and mask.shape == ids.shape
            and (mask == 0).any()
        ):
            padded = torch.where(mask == 0, torch.where(ids == 7, 8, 7), ids)
            checks["padding"] = {**self.inputs, ids_name: padded}, mask.bool()
        held = {}
        for what, (inputs, keep) in checks.items():
            a, b = self._positions(self.inputs, ids.shape), self._positions(inputs, ids.shape)
            if (
                a is not None
                and b is not None
                and close_tensors(a[keep], b[keep])
                and not torch.equal(a, b)
            ):
                held[what] = inputs, keep
        if not held:
            return Finding("not applicable", "the plain model hides neither the future nor padding")
        done = []
        methods: dict[str, Make] = {
            name: self.methods[name],
            "blur": lambda: dampen.BlurredAttention(5),
            "hard": lambda: dampen.HardMasking(0.5, top=0.5),
            "explicit": lambda: dampen.ExplicitDropout(value=1.0, ffn=1.0, rate=RATE),
        }
        for label, make in methods.items():
            self.methods[label] = make
            try:
                with self._regularized(label) as reg:
                    for what, (inputs, keep) in held.items():
                        for seed in range(3):
                            a = self._positions(self.inputs, ids.shape, seed, grad=True)
                            first = float(reg.penalty().detach())
                            b = self._positions(inputs, ids.shape, seed, grad=True)
                            second = float(reg.penalty().detach())
                            if a is None or b is None:
                                continue
                            if not close_tensors(a[keep], b[keep]):
                                worst = float((a[keep] - b[keep]).abs().max())
                                raise Wrong(
                                    f"{label}: hidden tokens ({what}) change the output by {worst:.3g}"
                                )
                            if what == "padding" and not close(first, second):
                                raise Wrong(
                                    f"{label}: padding changes the penalty from {first:.6g} to {second:.6g}"
                                )
                done.append(label)
            except Refused:
                continue
            finally:
                self._clean()
        return Finding("works", f"{', '.join(held)} under {', '.join(done)}")

    def _positions(
        self, inputs: dict[str, Any], shape: torch.Size, seed: int = 1, grad: bool = False
    ) -> Tensor | None:
        torch.manual_seed(seed)
        with torch.set_grad_enabled(grad):
            out = self.model.train()(**inputs)
        leaves = [
            t
            for t in pytree.tree_leaves(_plain(out))
            if isinstance(t, Tensor) and t.is_floating_point()
        ]
        found = next((t for t in leaves if t.ndim >= 3 and t.shape[:2] == shape), None)
        self._restore()
        return None if found is None else found.detach()


class Wrong(AssertionError):
    """A judgement that stops the rest."""


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Errors that dampen raises on purpose become `Refused`."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        if "/dampen/" in last.filename and (last.line or "").startswith("raise"):
            raise Refused(f"{type(error).__name__}: {error}") from error
        raise


class _Recorder(dampen.Regularizer):
    """Writes down which site runs, and at which depth, before each attention."""

    trace: Trace | None = None

    def mask(self, q: Tensor, k: Tensor, call: Any) -> Tensor:
        if _Recorder.trace is not None and self.site is not None:
            _Recorder.trace.next_site = (self.site.name, float(self.site.depth))
        return torch.zeros(1, 1, 1, k.shape[2], dtype=torch.bool)


def _recorder() -> dampen.Regularizer:
    return _Recorder()


def _blocks_of_queries(plain: Core, cores: list[Core]) -> tuple[Core | None, list[Core]]:
    """The calls that together attend from all queries of one call of the plain model, as one, and the calls after them:
    long rows are computed in blocks of queries."""
    start = next((i for i, c in enumerate(cores) if c.module == plain.module), len(cores))
    rows = 0
    for end in range(start, len(cores)):
        part = cores[end]
        if (part.shape[0], part.shape[2]) != (plain.shape[0], plain.shape[2]) or part.seen is None:
            break
        rows += part.shape[1]
        if rows == plain.shape[1]:
            seen = torch.cat([c.seen for c in cores[start : end + 1] if c.seen is not None], 1)
            return replace(cores[start], shape=plain.shape, seen=seen), cores[end + 1 :]
    return None, cores


def depth_finding(cores: list[Core]) -> Finding:
    """Whether the depths rise with the order of execution, in each chain of attentions that depend on each other."""
    roots: dict[str, list[float]] = defaultdict(list)
    for c in cores:
        roots[_root(c.site)].append(float(c.depth or 0.0))
    whole = all(min(d) == 0.0 and max(d) in (1.0, 0.0) for d in roots.values())
    first: dict[str, Core] = {}
    for c in cores:
        first.setdefault(f"{c.site} {c.module}", c)
    cores = list(first.values())  # a layer that runs again has one depth all the same
    # each root spans 0 to 1 by itself (an encoder and a decoder), or all of them are one stack (a U-Net)
    group = (lambda c: _root(c.site)) if whole else (lambda c: "")
    last: dict[str, Core] = {}
    for c in cores:
        before = last.get(group(c))
        if before is not None and before.depth is not None and c.depth is not None:
            depends = bool(c.ancestors >> before.index & 1)
            restarts = before.depth == 1.0 and c.depth == 0.0
            if c.depth < before.depth - 1e-6 and depends and not restarts:
                return Finding(
                    "WRONG",
                    f"'{c.site}' runs after '{before.site}', and its depth {c.depth:.3g} is below {before.depth:.3g}",
                )
            if (
                c.depth > before.depth + 1e-6
                and not depends
                and _root(c.site) != _root(before.site)
            ):
                return Finding(
                    "WRONG",
                    f"'{before.site}' (depth {before.depth:.3g}) and '{c.site}' (depth {c.depth:.3g}) are one stack, "
                    "though neither needs the other",
                )
        last[group(c)] = c
    return Finding("works", "", len(cores), len(cores))


def _root(site: str) -> str:
    """The name up to its first number."""
    return re.split(r"\.?\d", site, maxsplit=1)[0]


def holds(site: str, module: str) -> bool:
    """Whether a layer is a module or holds it; "" is the whole model."""
    return not site or module == site or module.startswith(f"{site}.")


def layers_of(report: str) -> dict[str, str]:
    """The layers that a printed report lists, with what it says of each."""
    lines = re.findall(r"^  (?!\()(\S+) +(.+)$", report, re.MULTILINE)
    return dict(lines)


def named(line: str) -> set[str]:
    """The modules that a line names; "blocks.0-2" stands for three."""
    found: set[str] = set()
    for word in re.findall(r"[\w.-]+", line):
        stem, _, last = word.strip(".").rpartition(".")
        span = re.fullmatch(r"(\d+)-(\d+)", last)
        numbers = range(int(span[1]), int(span[2]) + 1) if span else [last]
        found |= {f"{stem}.{n}" if stem else str(n) for n in numbers}
    return found


def said(report: str, module: str, method: str, part: str, reached: set[str]) -> bool:
    """Whether the printed report says that this method leaves out this part of this module.

    A share of the layers counts only for its method and its part, where it is the share that the probe counted, and
    only for a module in one of the layers that were not reached.

    Args:
        report: what `print(reg)` gives.
        module: the module that was left out.
        method: the class of the method.
        part: attention, feed-forward, projections or blocks.
        reached: the modules that the method reached.
    """

    def any_holds(names: set[str], name: str) -> bool:
        return any(holds(n, name) for n in names if n)

    layers = layers_of(report)
    here = max((n for n in layers if any_holds({n}, module)), key=len, default=None)
    acting = {n for n in layers if any(any_holds({n}, m) for m in reached)}
    if here is not None and re.match(
        r"-  |.*(nothing to drop|nothing runs|left out)", layers[here]
    ):
        return True
    for line in report.splitlines()[1:]:
        kind = re.match(r"  \((left out|skipped|outside|partial)\)  (.*)", line)
        if kind is None:
            continue
        what, text = kind.groups()
        if what in ("left out", "skipped") and any_holds(named(text), module):
            return True
        if not text.startswith(f"{method}: {part} in "):
            continue
        if what == "outside" and any_holds(named(text.partition("not in ")[2]), module):
            return True
        counted = re.search(r" in (\d+) of (\d+) layers", text)
        apart = here is not None and here not in acting
        counts = counted and (int(counted[1]), int(counted[2]))
        if what == "partial" and apart and counts == (len(acting), len(layers)):
            return True
    return False


def _plain(out: Any) -> Any:
    return out.to_tuple() if hasattr(out, "to_tuple") else out


def floats(out: Any) -> Tensor:
    """Every floating tensor of an output, in one."""
    found = [
        t
        for t in pytree.tree_leaves(_plain(out))
        if isinstance(t, Tensor) and t.is_floating_point()
    ]
    return torch.cat([t.float().flatten() for t in found]) if found else torch.zeros(0)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit, NaN included."""
    return a.shape == b.shape and bool(
        torch.equal(a.detach().nan_to_num(), b.detach().nan_to_num())
    )


def close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=2e-3, abs_tol=1e-9)


def close_tensors(a: Tensor, b: Tensor) -> bool:
    scale = max(1.0, float(a.abs().max())) if a.numel() else 1.0
    return bool(torch.allclose(a, b, rtol=1e-4, atol=1e-5 * scale, equal_nan=True))


def verdict(findings: dict[str, Finding]) -> str:
    """The worst of a model's outcomes."""
    outcomes = {f.outcome for f in findings.values()}
    for bad in ("CRASH", "WRONG", "SILENT", "refused"):
        if bad in outcomes:
            return bad
    return "works" if "works" in outcomes else "not applicable"
