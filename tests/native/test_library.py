"""How the kernels are built, kept, checked and found: whatever happens to the file or the compiler, no process ends."""

import os
import stat
import subprocess
import sys

import pytest
import torch

from dampen.native import __main__ as command
from dampen.native import library

SOME_CALL = (
    "import torch, dampen; q = torch.randn(1, 2, 5, 4); torch.manual_seed(0);"
    "print(float(dampen.attention(q, q, q, regularizers=[dampen.DropKey(0.3)]).isfinite().all()), "
    "dampen.native.status())"
)


def process(*arguments, **env):
    """A Python process: what it said and how it ended. A signal's number is negative."""
    told = {**os.environ, **{k: str(v) for k, v in env.items()}}
    return subprocess.run([sys.executable, *arguments], capture_output=True, timeout=300, env=told)


@pytest.fixture
def kept(native_cache, tmp_path):
    """A cache folder with the built library, to be damaged."""
    (source,) = native_cache.glob("native-*.so")
    copy = tmp_path / source.name
    copy.write_bytes(source.read_bytes())
    return copy


# --- a damaged file ---------------------------------------------------------------------------------------------------

DAMAGE = {
    "cut": lambda content: content[: len(content) // 2],
    "cut by one byte": lambda content: content[:-1],
    "empty": lambda content: b"",
    "zeros at its end": lambda content: (
        content[: len(content) // 2] + bytes(len(content) - len(content) // 2)
    ),
    "zeros in the middle": lambda content: content[:4096] + bytes(8192) + content[12288:],
    "one bit": lambda content: content[:9000] + bytes([content[9000] ^ 1]) + content[9001:],
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_seen(kept, how):
    good = kept.read_bytes()
    assert library.damage(kept) == ""
    kept.write_bytes(DAMAGE[how](good))
    assert library.damage(kept)


@pytest.mark.parametrize("how", ["cut", "zeros at its end"])
def test_a_damaged_library_is_not_used_and_built_again_on_request(kept, how):
    """One that was cut or held zeros once ended every process that loaded it, by SIGBUS. Nothing is built by itself."""
    kept.write_bytes(DAMAGE[how](kept.read_bytes()))
    done = process("-c", SOME_CALL, DAMPEN_CACHE=kept.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"1.0 native kernels off")
    assert done.stderr.count(b"\n") == 1
    assert b"are damaged" in done.stderr
    assert b"To build them again: dampen doctor --build" in done.stderr
    assert library.damage(kept)
    process("-m", "dampen.native", DAMPEN_CACHE=kept.parent)
    assert library.damage(kept) == ""


def test_nothing_half_written_is_left(kept, monkeypatch):
    monkeypatch.setenv("DAMPEN_CACHE", str(kept.parent))
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(library.BuildError):
        library.build(again=True)
    assert [p.name for p in kept.parent.iterdir()] == [kept.name]
    library.reset()


# --- the key ----------------------------------------------------------------------------------------------------------


def test_another_processor_or_flag_is_another_library(monkeypatch):
    here = library.library_path()
    monkeypatch.setattr(library, "instruction_sets", lambda: ["x86_64", "avx2"])
    elsewhere = library.library_path()
    monkeypatch.setattr(library, "instruction_sets", lambda: ["x86_64", "avx2", "avx512f"])
    assert len({here, elsewhere, library.library_path()}) == 3
    monkeypatch.setenv("DAMPEN_NATIVE_FLAGS", "-O1")
    assert library.library_path() not in (here, elsewhere)


def test_the_model_of_a_processor_says_nothing(monkeypatch, tmp_path):
    """Two virtual machines of one name may offer different instructions; a new kernel lists new security features."""
    info = "model name\t: {}\nflags\t\t: fpu {} ibrs\n"
    found = []
    for name, flags in (
        ("EPYC", "sse2 avx2"),
        ("EPYC", "sse2 avx2 avx512f"),
        ("Xeon", "avx2 mitigated sse2"),
    ):
        path = tmp_path / "cpuinfo"
        path.write_text(info.format(name, flags))
        monkeypatch.setattr(library, "Path", lambda _, path=path: path)
        found.append(library.instruction_sets())
    assert found[0] == found[2] != found[1]
    assert "avx512f" in found[1]


def test_a_library_of_another_processor_is_not_run(built, monkeypatch):
    """The library compares what the compiler used with the processor, before anything else is called."""
    loaded = library.library()
    assert loaded.dampen_start(library._torch_gemm()) is None

    class Lacking:
        def __getattr__(self, name):
            return getattr(loaded, name)

        def dampen_start(self, gemm):
            return b"the processor has no avx512f"

    monkeypatch.setattr(
        library.ctypes, "CDLL", lambda path: Lacking() if "native-" in path else loaded
    )
    monkeypatch.setattr(library, "_torch_gemm", lambda: None)
    monkeypatch.setattr(library, "_declare", lambda _: None)
    library.reset()
    assert not library.available()
    assert "built for another processor (the processor has no avx512f)" in library.status()
    monkeypatch.undo()
    library.reset()


# --- the command ------------------------------------------------------------------------------------------------------


def compiler(folder, script):
    path = folder / "compiler"
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


COMPILERS = {
    "writes nothing": ("exit 0", "wrote nothing"),
    "writes an empty file": ('for last; do :; done; : > "$last"', "wrote nothing"),
    "writes no library": ('for last; do :; done; echo text > "$last"', "does not work"),
    "says what is not UTF-8": (r"printf 'error: \377\376 caf\351\n' >&2; exit 1", "error: "),
    "says nothing": ("exit 3", "exit code 3, and no word"),
    "crashes": ("kill -SEGV $$", "ended by signal 11"),
    "takes too long": ("exec sleep 60", "not done after 1 s"),
    "waits for input": ("cat > /dev/null; exit 1", "exit code 1"),
}


@pytest.fixture
def said(monkeypatch, capfd):
    """The command as a function of the environment: the one line that it prints."""

    def run(**env):
        for name, value in env.items():
            monkeypatch.setenv(name, str(value))
        library.reset()
        command.main()
        out, err = capfd.readouterr()
        assert err == ""
        assert out.count("\n") == 1
        assert out.isascii()
        assert "torch's kernels will be used" in out
        return out

    yield run
    monkeypatch.undo()
    library.reset()


@pytest.mark.parametrize("how", COMPILERS)
def test_the_command_never_fails_whatever_the_compiler_does(tmp_path, said, monkeypatch, how):
    """A sentence says what happened and what runs instead; these once ended in tracebacks."""
    script, expected = COMPILERS[how]
    monkeypatch.setattr(library, "COMPILE_WITHIN", 1.0 if how == "takes too long" else 600.0)
    cache = tmp_path / "cache"
    assert expected in said(DAMPEN_CACHE=cache, CXX=compiler(tmp_path, script))
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("how", ["a file", "in a file", "no right", "a broken link"])
def test_the_command_never_fails_whatever_the_cache_folder_is(tmp_path, said, how):
    cache = tmp_path / "cache"
    if how == "a broken link":
        cache.symlink_to(tmp_path / "nowhere" / "at all")
    elif how == "no right":
        cache = "/proc/dampen"
    else:
        cache.write_text("text")
        cache = cache / "below" if how == "in a file" else cache
    assert "cannot be used" in said(DAMPEN_CACHE=cache)


@pytest.mark.parametrize(
    ("cxx", "expected"),
    [
        ("no-such-compiler", "could not be run"),
        ("'unbalanced", "is no command"),
        ("/", "could not be run"),
    ],
)
def test_the_command_never_fails_whatever_cxx_says(tmp_path, said, cxx, expected):
    assert expected in said(DAMPEN_CACHE=tmp_path, CXX=cxx)


def test_the_command_never_fails_whatever_else_happens(tmp_path, said, monkeypatch):
    def broken():
        raise RuntimeError("caf\u00e9\nin two lines")

    monkeypatch.setattr(command, "build", broken)
    assert "RuntimeError: caf\\xe9 in two lines" in said(DAMPEN_CACHE=tmp_path)


def test_the_command_exits_with_0(tmp_path):
    """As `make native` runs it, where even the terminal knows ASCII alone."""
    script = compiler(tmp_path, COMPILERS["says what is not UTF-8"][0])
    done = process(
        "-m", "dampen.native", DAMPEN_CACHE=tmp_path, CXX=script, PYTHONIOENCODING="ascii"
    )
    assert done.returncode == 0
    assert done.stderr == b""
    assert b"torch's kernels will be used" in done.stdout


def test_the_command_says_that_they_are_switched_off(native_cache, monkeypatch, capsys):
    monkeypatch.setenv("DAMPEN_CACHE", str(native_cache))
    monkeypatch.setenv("DAMPEN_NATIVE", "0")
    command.main()
    assert capsys.readouterr().out == "native kernels off: DAMPEN_NATIVE=0.\n"
    monkeypatch.undo()
    library.reset()


def test_cxx_may_hold_arguments(monkeypatch):
    monkeypatch.setenv("CXX", "ccache 'g++ 12' -pipe")
    assert library._compiler() == ["ccache", "g++ 12", "-pipe"]


# --- when it is decided -----------------------------------------------------------------------------------------------

DRAWS = """
import sys, torch, dampen
torch.set_num_threads(1)

def step(compiled, whole):
    torch.manual_seed(0)
    x = torch.rand(4, 1, 8, 8)
    m = dampen.models.ViT(image_size=8, patch_size=2, channels=1, width=32, depth=2, heads=4, mlp=64).train()
    if whole:
        dampen.regularize(m, dampen.DropKey(0.3))
        run = m
    else:
        run = lambda x: dampen.attention(*[x.view(4, 1, 8, 8)] * 3, regularizers=methods)
        methods = [dampen.DropKey(0.3)]
    torch.manual_seed(1)
    return (torch.compile(run, backend="eager", fullgraph=True) if compiled else run)(x).square().mean().item()

found = [step(compiled == "c", sys.argv[1] == "model") for compiled in sys.argv[2]]
print(*found)
"""


@pytest.mark.parametrize("what", ["model", "function"])
def test_the_same_seed_draws_the_same_whatever_ran_first(native_cache, what):
    """A process that compiled first once never looked for the kernels, and drew otherwise than one that ran eagerly."""
    said = [process("-c", DRAWS, what, order, DAMPEN_CACHE=native_cache) for order in ("ce", "ec")]
    assert all(done.returncode == 0 for done in said), said[0].stderr
    assert len({round(float(x), 6) for done in said for x in done.stdout.split()}) == 1


def test_regularize_decides(built, monkeypatch):
    import dampen

    library.reset()
    assert not library.looked
    dampen.regularize(
        dampen.models.ViT(image_size=8, patch_size=4, width=16, depth=1, heads=2, mlp=16),
        dampen.DropKey(0.1),
    )
    assert library.looked
    assert torch.ops.dampen.attention
