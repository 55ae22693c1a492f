"""Output that never ends a program: encodings, closed streams, pipes without a reader."""

import io
import os
import subprocess
import sys
import warnings

import pytest

from rlhf_jax.utils.output import Output, guarded_output
from tests.helpers.full_disk import Disk

TEXT = "caf\xe9 \U0001f600 \u2502 \ud800"


@pytest.mark.parametrize(
    ("encoding", "printed"),
    [
        ("ascii", rb"caf\xe9 \U0001f600 \u2502 \ud800"),
        ("latin-1", b"caf\xe9 \\U0001f600 \\u2502 \\ud800"),
        ("utf-8", TEXT[:-1].encode() + rb"\ud800"),
    ],
)
def test_characters_outside_an_encoding_are_escapes(monkeypatch, encoding, printed):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    with guarded_output():
        print(TEXT, flush=True)
        assert sys.stdout.encoding == encoding and not sys.stdout.isatty()
    assert raw.getvalue() == printed + b"\n" and sys.stdout is stream


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


def without_reader():
    reads, writes = os.pipe()
    os.close(reads)
    return open(writes, "w", buffering=1)


class Full(io.StringIO):
    def flush(self):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("stream", [closed, without_reader, Full, lambda: None])
def test_a_stream_that_takes_no_text_raises_nothing(monkeypatch, stream):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, stream())
    with guarded_output():
        for _ in range(3):
            print("a line", flush=True)
            print("a line", file=sys.stderr, flush=True)


@pytest.mark.parametrize(
    ("lost", "kept", "long"), [("stdout", "stderr", "standard output"), ("stderr", "stdout", "standard error")]
)
@pytest.mark.parametrize(
    ("stream", "reason"),
    [(Full, "No space left on device"), (closed, "I/O operation on closed file"), (without_reader, "Broken pipe")],
)
def test_what_is_lost_is_said_once_on_the_other_stream(monkeypatch, lost, kept, long, stream, reason):
    other = io.StringIO()
    monkeypatch.setattr(sys, lost, stream())
    monkeypatch.setattr(sys, kept, other)
    with guarded_output():
        for _ in range(3):
            print("a line", file=getattr(sys, lost), flush=True)
    assert other.getvalue() == f"{long} takes no more text ({reason}); going on without it\n"


def test_a_disk_that_has_room_again_gets_text_again(monkeypatch):
    stream = Disk()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with guarded_output():
        print("lost", flush=True)
        stream.full = False
        print("kept", flush=True)
    assert stream.getvalue() == "kept\n"


def test_guards_do_not_pile_up_and_leave_a_stream_of_the_user_alone(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with guarded_output():
        outer = sys.stdout
        with guarded_output():
            assert sys.stdout is outer and isinstance(outer, Output)
        mine = io.StringIO()
        sys.stdout = mine
    assert sys.stdout is mine


def test_a_program_whose_reader_has_ended_ends_well():
    code = "from rlhf_jax.utils.output import guarded_output\n@guarded_output()\ndef main():\n"
    code += "    for i in range(100_000): print(i)\nmain()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        child.stdout.readline()
        child.stdout.close()
        note = b"standard output takes no more text (Broken pipe); going on without it\n"
        assert (child.wait(), child.stderr.read()) == (0, note)


@pytest.mark.parametrize("lines", [1, 20_000])
@pytest.mark.parametrize("show", ["print", "show"])
def test_nothing_is_said_by_python_of_a_reader_that_ended_first(lines, show):
    code = "import sys\nfrom rlhf_jax.utils.output import guarded_output, show\n@guarded_output()\ndef main():\n"
    code += f"    sys.stdin.read()\n    {show}('a line\\n' * {lines})\nmain()"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, env=environment) as child:
        child.stdout.close()
        child.stdin.close()
        note = b"standard output takes no more text (Broken pipe); going on without it\n"
        assert (child.wait(), child.stderr.read()) == (0, b"" if show == "show" else note)


def test_warnings_of_the_package_are_a_line_and_others_are_pythons(capsys):
    package, ours = Output.__init__.__code__.co_filename, "the adapter has no base"
    before = warnings.formatwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with guarded_output():
            warnings.showwarning = lambda *args: sys.stderr.write(warnings.formatwarning(*args[:4]))
            warnings.warn_explicit(ours, UserWarning, package, 7)
            warnings.warn_explicit("slow", UserWarning, "/site-packages/other.py", 7)
            warnings.warn_explicit("old", DeprecationWarning, package, 7)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"warning: {ours}" and lines[1] == "/site-packages/other.py:7: UserWarning: slow"
    assert f"{package}:7: DeprecationWarning: old" in lines and warnings.formatwarning is before
