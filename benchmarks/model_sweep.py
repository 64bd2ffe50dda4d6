"""Which methods work in which models: every timm module and transformers family that can be built here, tiny, with
random weights.

A case *works* when a training step with the method differs measurably from the plain one and has finite gradients, and
eval is bit-exact, the keys of the state_dict are unchanged, and after removal classes and results are what they were.
It is *refused* when dampen raises and says why. It is *not applicable* where the model has no softmax attention, or no
residual branch. Anything else is *wrong*.

    python -m benchmarks.model_sweep                    # writes benchmarks/records/model_sweep.json and docs/models.md
    python -m benchmarks.model_sweep --only swin --dry  # a look, nothing written
    python -m benchmarks.model_sweep --page             # the page again, from the record
    python -m benchmarks.model_sweep --part 0/2 --resume  # every second model that the record lacks, or has from before

A sweep that was cut short leaves the cases of the one before it in the record, by name in `older`; the page says so."""

from __future__ import annotations

import argparse
import json
import signal
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import dampen
from benchmarks.tiny_models import NotBuilt, Subject, outputs_of, timm_subjects, transformers_subjects
from dampen.studies.files import write_json

ROOT = Path(__file__).parent.parent
RECORD, PAGE = ROOT / "benchmarks/records/model_sweep.json", ROOT / "docs/models.md"
METHODS: dict[str, list[Callable[[], dampen.Regularizer]]] = {
    "DropKey": [lambda: dampen.DropKey(0.4)],
    "ExplicitDropout": [
        lambda: dampen.ExplicitDropout(value=0.1, ffn=0.1),
        lambda: dampen.ExplicitDropout(value=0.1),  # a model without linear feed-forward maps
    ],
    "DropPath": [lambda: dampen.DropPath(0.4)],
    "HardMasking": [lambda: dampen.HardMasking(0.5, top=0.5)],
    "DropHead": [lambda: dampen.DropHead(0.5)],
}
SECONDS = 90  # of processor time per model: a busy machine must not decide what is built


_PRODUCTS = {"matmul", "__matmul__", "bmm", "baddbmm", "einsum"}
_MAPS = {"linear", "addmm", "conv1d", "conv2d", "conv3d", "layer_norm", "batch_norm"}


class Spy(TorchFunctionMode):
    """Whether a plain forward has softmax attention: a fused call, or a softmax of what a product of two tensors that
    are no parameters became without another map between."""

    def __init__(self) -> None:
        super().__init__()
        self.attends = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        out = func(*args, **kwargs)
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        product = name in _PRODUCTS and not any(isinstance(t, nn.Parameter) for t in given)
        carried = name not in _MAPS and any(getattr(t, "_spied", False) for t in given)
        if name in ("scaled_dot_product_attention", "multi_head_attention_forward") or (name == "softmax" and carried):
            self.attends = True
        if (product or carried) and isinstance(out, Tensor) and not isinstance(out, nn.Parameter):
            out._spied = True  # type: ignore[attr-defined]
        return out


def judge(subject: Subject, method: str) -> dict[str, str]:
    """The outcome of one method on one model; the model is as before afterwards."""
    said: dict[str, str] = {}
    for make in METHODS[method]:
        said = _judge(subject, make())
        if said["outcome"] != "refused":
            return said
    return said


def _judge(subject: Subject, method: dampen.Regularizer) -> dict[str, str]:
    model, inputs = subject.model, subject.inputs
    state = {k: v.clone() for k, v in model.state_dict().items()}
    classes = {n: type(m) for n, m in model.named_modules()}
    reg = None
    try:
        plain_eval, plain_train = _eval(model, inputs), _train(model, inputs, state)
        reg = dampen.regularize(model, method)
        if list(model.state_dict()) != list(state):
            return _wrong("the keys of its state_dict changed")
        if not _equal(_eval(model, inputs), plain_eval):
            return _wrong("eval differs")
        model.load_state_dict(state)
        torch.manual_seed(1)
        out = outputs_of(model.train()(**inputs))
        penalty = reg.penalty()
        (out.float().square().mean() + penalty).backward()
        finite = all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in model.parameters())
        model.zero_grad()
        if not finite and bool(torch.isfinite(plain_train).all()):
            return _wrong("gradients are not finite")
        if _equal(out.detach(), plain_train) and not penalty.requires_grad:
            return _wrong("nothing happened")
        layers = len(reg.layers)
        reg.remove()
        reg = None
        model.load_state_dict(state)
        if {n: type(m) for n, m in model.named_modules()} != classes or not _equal(_eval(model, inputs), plain_eval):
            return _wrong("removal did not restore the model")
        return {"outcome": "works", "layers": str(layers)}
    except (RuntimeError, ValueError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        own = "/dampen/" in last.filename and (last.line or "").startswith("raise")
        return {"outcome": "refused" if own else "wrong", "why": f"{type(error).__name__}: {error}"[:400]}
    except TimeoutError:
        raise
    except Exception as error:
        return _wrong(f"{type(error).__name__}: {error}"[:300])
    finally:
        if reg is not None:
            reg.remove()
        model.zero_grad()
        model.load_state_dict(state)


def _wrong(why: str) -> dict[str, str]:
    return {"outcome": "wrong", "why": why}


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(torch.equal(a.nan_to_num(), b.nan_to_num()))


def _eval(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    torch.manual_seed(1)
    return outputs_of(model.eval()(**inputs)).detach()


def _train(model: nn.Module, inputs: dict[str, Any], state: dict[str, Tensor]) -> Tensor:
    torch.manual_seed(1)
    out = outputs_of(model.train()(**inputs)).detach()
    model.load_state_dict(state)
    return out


def not_applicable(subject: Subject) -> str:
    """The closed list: why no method of attention or branches can apply, or an empty string."""
    with Spy() as spy:
        subject.model.train()(**subject.inputs)
    return "" if spy.attends else "no softmax attention"


def has_branches(subject: Subject) -> bool:
    """Whether any attention stands in a block, and not only in a pooling head."""
    try:
        found = dampen.sockets.find.find_attentions(subject.model)
    except ValueError:
        return True
    return any("pool" not in (n + type(m).__name__).lower() for n, m in found.items()) or not found


def sweep(
    library: str, only: str, part: tuple[int, int], known: dict[str, Any], save: Callable[[str, dict[str, Any]], None]
) -> dict[str, Any]:
    """Every case of one library; those in `known` are not run again, and each is saved as soon as it is known."""
    subjects = timm_subjects if library == "timm" else transformers_subjects
    results = dict(known)
    for i, (name, build) in enumerate(subjects(only)):
        if name in results or i % part[1] != part[0]:
            continue
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
        try:
            results[name] = _case(build)
        except TimeoutError:
            results[name] = {"model": name, "not built": f"it takes longer than {SECONDS} s here"}
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        save(name, results[name])
        said = results[name].get("not built") or {m: c["outcome"] for m, c in results[name]["methods"].items()}
        print(library, name, said, flush=True)
        for m, case in results[name].get("methods", {}).items():
            if "why" in case and case["outcome"] != "not applicable":
                print("    ", m, case["why"], flush=True)
    return results


def _case(build: Callable[[], Subject]) -> dict[str, Any]:
    try:
        subject = build()
    except NotBuilt as error:
        return {"not built": str(error)}
    none = not_applicable(subject)
    if none:
        return {"model": subject.name, "methods": {m: {"outcome": "not applicable", "why": none} for m in METHODS}}
    methods = {m: judge(subject, m) for m in METHODS}
    if methods["DropPath"]["outcome"] == "refused" and not has_branches(subject):
        methods["DropPath"] = {"outcome": "not applicable", "why": "no residual branch"}
    return {"model": subject.name, "methods": methods}


def totals(cases: dict[str, Any]) -> Counter[str]:
    """How many cases have which outcome."""
    return Counter(c["outcome"] for case in cases.values() for c in case.get("methods", {}).values())


def page(record: dict[str, Any]) -> str:
    """The table as Markdown."""
    lines = [
        "# Which methods work in which models", "",
        "Generated by `python -m benchmarks.model_sweep` from `benchmarks/records/model_sweep.json`: tiny models with "
        "random weights. **Works** means: a training step that differs measurably with finite gradients, eval exact to "
        "the bit, unchanged keys, exact removal. *Refused* means that dampen raises and says why. *n/a* stands only "
        "where a model has no softmax attention, or no residual branch.", "",
        "What the numbers do not say: models that could not be built here are in no total; ExplicitDropout counts as "
        "working with its value term alone where the feed-forward terms are refused; a model counts as working where "
        "layers without a softmax over tokens (of channels, linear, deformable) are left out of it; and which axis a "
        "draw is made over is checked by tests on a few models, not by this sweep.", "",
    ]  # fmt: skip
    for library in ("timm", "transformers"):
        cases = record[library]
        sums = totals(cases)
        applicable = sum(sums.values()) - sums["not applicable"]
        built = {n: c for n, c in cases.items() if "methods" in c}
        lines += [
            f"## {library} {record['versions'][library]}", "",
            f"{len(built)} of {len(cases)} could be built here. Of {applicable} applicable cases {sums['works']} work "
            f"({100 * sums['works'] / max(1, applicable):.1f} %), {sums['refused']} are refused, {sums['wrong']} are "
            f"wrong.{_older(record, library)}", "",
            "| model | " + " | ".join(METHODS) + " |", "|---" * (1 + len(METHODS)) + "|",
        ]  # fmt: skip
        marks = {"works": "works", "refused": "*refused*", "not applicable": "n/a", "wrong": "**WRONG**"}
        for name, case in sorted(built.items()):
            if any(c["outcome"] != "not applicable" for c in case["methods"].values()):
                lines.append(f"| {name} | " + " | ".join(marks[c["outcome"]] for c in case["methods"].values()) + " |")
        without = [n for n, c in built.items() if all(x["outcome"] == "not applicable" for x in c["methods"].values())]
        lines += ["", f"No softmax attention: {', '.join(sorted(without)) or 'none'}.", ""]
        lines += ["Why refused:", ""]
        for name, case in sorted(built.items()):
            reasons: dict[str, list[str]] = {}
            for m, c in case["methods"].items():
                if c["outcome"] in ("refused", "wrong"):
                    reasons.setdefault(c["why"].split(". ")[0].replace("|", "/"), []).append(m)
            lines += [f"- {name}: {', '.join(ms)}: {why}" for why, ms in reasons.items()]
        left = {n: c["not built"] for n, c in cases.items() if "not built" in c}
        lines += ["", "Not built here:", "", *(f"- {n}: {w[:120]}" for n, w in sorted(left.items())), ""]
    return "\n".join(lines) + "\n"


def _older(record: dict[str, Any], library: str) -> str:
    """How many cases are of a sweep before the last, in words."""
    older = record.get("older", {}).get(library, ())
    return f" {len(older)} of the models were swept before the last changes of the code." if older else ""


def _late(*_: Any) -> None:
    raise TimeoutError


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=("timm", "transformers"))
    parser.add_argument("--only", default="", help="models whose name holds this text")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    parser.add_argument("--page", action="store_true", help="write the page from the record")
    parser.add_argument("--part", default="0/1", help="i/n: every nth model from the ith on, for several processes")
    parser.add_argument("--resume", action="store_true", help="keep what the record has")
    options = parser.parse_args(arguments)
    import timm
    import transformers

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    signal.signal(signal.SIGVTALRM, _late)
    record: dict[str, Any] = {"timm": {}, "transformers": {}, "older": {"timm": [], "transformers": []}}
    if RECORD.exists():
        record = json.loads(RECORD.read_text())
    record["versions"] = {
        "timm": timm.__version__, "transformers": transformers.__version__, "torch": torch.__version__
    }  # fmt: skip
    chosen = [x for x in ("timm", "transformers") if not options.page and options.library in (None, x)]
    if not (options.resume or options.dry or options.only) and options.part == "0/1":
        record["older"] = record.get("older", {}) | {library: sorted(record[library]) for library in chosen}
        write_json(RECORD, record)
    for library in ("timm", "transformers"):
        if library in chosen:
            before = record.get("older", {}).get(library, ())
            known = {n: c for n, c in record[library].items() if n not in before} if options.resume else {}
            known = {} if options.dry else known

            def save(name: str, case: dict[str, Any], library: str = library) -> None:
                if not options.dry:  # read again: another part may have written since
                    now = json.loads(RECORD.read_text()) if RECORD.exists() else record
                    now["versions"] = record["versions"]
                    now[library][name] = case
                    older = now.setdefault("older", {}).get(library, ())
                    now["older"][library] = [n for n in older if n != name]
                    write_json(RECORD, now)

            number, parts = map(int, options.part.split("/"))
            cases = sweep(library, options.only, (number, parts), known, save)
            sums = totals(cases)
            applicable = sum(sums.values()) - sums["not applicable"]
            print(library, dict(sums), f"{100 * sums['works'] / max(1, applicable):.1f} % of {applicable} work")
    if not options.dry:
        PAGE.write_text(page(json.loads(RECORD.read_text())))


if __name__ == "__main__":
    main()
