"""Anything at all in the place of a config, a row, a checkpoint or a reward server's answer: it is read, or refused by
an error that speaks to the user. With RLHF_JAX_FUZZ_EXAMPLES=10000 in the environment it does the same at length."""

import asyncio
import contextlib
import dataclasses
import io
import json
import os
import re
import socket
import sys
import threading
import types
import zipfile

import jax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_jax import data, models
from rlhf_jax.config import STAGES, Pipeline, PPOConfig, RewardConfig, SFTConfig, batch_sizes, command_line, stages_of
from rlhf_jax.config import files as config_files
from rlhf_jax.config.check import check
from rlhf_jax.data import synthetic
from rlhf_jax.errors import UserError
from rlhf_jax.models.io import hf
from rlhf_jax.rewards.interface import RewardFailure
from rlhf_jax.rewards.server import RemoteReward
from rlhf_jax.utils import text

EXAMPLES = int(os.environ.get("RLHF_JAX_FUZZ_EXAMPLES", "60"))
SECRET = 's3cret/"token'
fuzz = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize=EXAMPLES < 1000,  # the same every time, so that the suite never fails by chance
    suppress_health_check=list(HealthCheck),
)


@contextlib.contextmanager
def nothing_but_a_user_error():
    """The one exception that is allowed, with a text that a terminal may have."""
    try:
        yield
    except UserError as error:
        said = str(error)
        assert said and text.printable(said) == said and len(said) < 2 * text.MAX_MESSAGE_LENGTH


# --- what to feed

ODD_NUMBERS = [0, -1, 1, 2**31, 2**63, 2**64, 10**400, -(10**30), 1e308, -1e-320, 1e-45, 0.5]
ODD_NUMBERS += [float("nan"), float("inf"), -float("inf")]
characters = st.characters() | st.sampled_from("\x00\x1b\x9b\u202e\u2028\ud800\ufeff{}[]\"',:=.-/~%\n")
words = st.text(characters, max_size=12)
odd_words = st.sampled_from(
    ["", "none", "None", "nan", "-inf", "1e999", "true", "null", "../..", "a\0b", "[" * 2000, "9" * 5000]
)
scalars = st.none() | st.booleans() | st.integers() | st.sampled_from(ODD_NUMBERS) | st.floats() | words | odd_words
plausible = st.integers(-2, 70) | st.sampled_from([2**20, 2**31 - 1, 1e-6, 3e38]) | st.floats(0, 2)
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3), max_leaves=6
)


def as_json(value) -> bytes:
    return json.dumps(value).encode()


@st.composite
def damaged(draw, whole: bytes) -> bytes:
    """The bytes cut, with some of them changed, put in or taken out; or others altogether."""
    kind = draw(st.sampled_from(["cut", "change", "change", "change", "insert", "remove", "random"]))
    if kind == "random":
        return draw(st.binary(max_size=200))
    out = bytearray(whole)
    if kind == "cut":
        return bytes(out[: draw(st.integers(0, len(out)))])
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(out) - 1, 0)))
        if kind == "change" and out:
            out[at] = draw(st.integers(0, 255))
        elif kind == "insert":
            out[at:at] = draw(st.binary(max_size=9))
        else:
            del out[at : at + draw(st.integers(1, 40))]
    return bytes(out)


# --- configs

WHOLE = {name: config_files.to_json(stage()) for name, stage in STAGES.items()} | {
    "pipeline": config_files.to_json(Pipeline())
}
FIELDS = sorted({field.name for stage in STAGES.values() for field in dataclasses.fields(stage)})


def add_up(config) -> None:
    """What a run does with a config before it opens anything."""
    check(config)
    for stage in stages_of(config).values():
        batch_sizes.batch_lines(stage, 1000)
        batch_sizes.check_rows(stage, 1000)


@fuzz
@given(st.sampled_from(sorted(WHOLE)), st.data())
def test_any_config_json_is_read_or_refused(stage, choose):
    fields = json.loads(WHOLE[stage])
    if choose.draw(st.booleans()):
        names = st.sampled_from([*fields, *fields, "stage", "sft", "ppo", "\x1b[31m"])
        for name in choose.draw(st.lists(names, min_size=1, max_size=4)):
            fields[name] = choose.draw(plausible | json_values)
        written = as_json(fields)
    else:
        written = choose.draw(damaged(WHOLE[stage].encode()))
    with nothing_but_a_user_error():
        add_up(config_files.from_json(written.decode("utf-8", "replace")))


names = (
    st.sampled_from([*FIELDS, *FIELDS, "config", "ppo.seed", "no_dry_run", "help", "steps_per_generation", "", "-"])
    | words
)
values = st.sampled_from(["3", "1e-3", "a,b", '{"top_k": 1}']) | plausible.map(str) | words | odd_words
flags = st.tuples(names, st.lists(values, max_size=2) | plausible.map(lambda value: [str(value)]))


@fuzz
@given(st.sampled_from(["tldr_ppo", "tldr_sft", "tldr_rloo.py", "quickstart"]), st.lists(flags, max_size=4))
def test_any_command_line_is_read_or_refused(config, given):
    line = ["--config", config, *(part for name, values in given for part in (f"--{name}", *values))]
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet), contextlib.suppress(SystemExit):
        with nothing_but_a_user_error():
            add_up(command_line.parse(line))


class Odd:
    """An object whose own code fails."""

    def __repr__(self):
        raise RuntimeError("no repr")

    def __eq__(self, other):
        raise RuntimeError("no ==")

    __hash__ = None


def of_python(inner):
    return st.lists(inner, max_size=3).map(tuple) | st.sets(st.integers(), max_size=2) | st.builds(Odd)


python_values = (
    json_values | of_python(json_values) | st.binary(max_size=4) | st.just(Odd) | st.just(print) | st.complex_numbers()
)
made = st.tuples(
    st.sampled_from([*STAGES.values(), Pipeline]), st.dictionaries(st.sampled_from(FIELDS), python_values, max_size=3)
)
failures = st.sampled_from(
    [
        SystemExit(0),
        SystemExit(),
        ValueError("\x1b[2J"),
        StopIteration(),
        RecursionError(),
        OSError(5, "a"),
        type("E", (BaseException,), {})("x"),
    ]
)
holder = types.ModuleType("rlhf_jax_fuzzed")
sys.modules[holder.__name__] = holder


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "mine.py"
    path.write_text("import rlhf_jax_fuzzed\n\ndef get_config(variant=None):\n    return rlhf_jax_fuzzed.make()\n")
    return str(path)


@fuzz
@given(made | failures | python_values)
def test_whatever_a_config_file_returns_or_raises_is_read_or_refused(config_file, what):
    def make():
        if isinstance(what, BaseException):
            raise what
        return (
            what[0](**what[1])
            if isinstance(what, tuple) and len(what) == 2 and what[0] in [*STAGES.values(), Pipeline]
            else what
        )

    holder.make = make
    with nothing_but_a_user_error():
        add_up(config_files.load_config(config_file))


# --- rows

ROWS = [*synthetic.demonstrations(2), *synthetic.preference_pairs(2)]
COLUMNS = ["prompt", "completion", "chosen", "rejected", "subreddit", "title", "post", "summary", "margin"]
messages = st.lists(st.dictionaries(st.sampled_from(["role", "content"]), words | json_values, max_size=2), max_size=3)
row_values = words | st.sampled_from([row[key] for row in ROWS for key in row]) | json_values | messages
rows = st.dictionaries(st.sampled_from(COLUMNS) | words, row_values, max_size=6)
good_rows = st.sampled_from([as_json(row) for row in ROWS])
json_lines = st.lists(good_rows | rows.map(as_json) | good_rows.flatmap(damaged) | json_values.map(as_json), max_size=5)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def tokenizer():
    found = data.load_tokenizer("synthetic")
    found.hf.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
    return found


@fuzz
@given(json_lines, st.sampled_from([".jsonl", ".json", ".csv"]), st.data())
def test_any_rows_are_read_or_refused(place, tokenizer, given, suffix, choose):
    path = place / f"rows{suffix}"
    joined = b"[" + b",".join(given) + b"]" if suffix == ".json" else b"\n".join(given)
    path.write_bytes(choose.draw(damaged(joined)) if choose.draw(st.integers(0, 4)) == 0 else joined)
    options = {"dataset_name": str(path), "on_bad_row": choose.draw(st.sampled_from(["skip", "raise"]))}
    options["query_overflow"] = choose.draw(st.sampled_from(["truncate", "drop"]))
    margin = choose.draw(st.sampled_from([None, "margin"]))
    for kind, config in (
        (data.PromptData, PPOConfig(query_length=24, **options)),
        (data.DemoData, SFTConfig(query_length=24, max_length=40, **options)),
        (data.PairData, RewardConfig(query_length=24, max_length=60, margin_column=margin, **options)),
    ):
        with nothing_but_a_user_error():
            found = data.load(kind, config, tokenizer)
            assert len(found) and str(found.report)
            found.batch(0, 0, 1)


# --- checkpoints


class Checkpoint(tuple):
    """A tuple that hypothesis does not write out."""

    def __new__(cls, *parts):
        return super().__new__(cls, parts)

    def __repr__(self):
        return "the checkpoint"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder to write into, {file: its bytes}, members of a .bin file."""
    torch = pytest.importorskip("torch")
    whole, folder = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("checkpoint")
    model = models.custom_shape("1x8x1", vocab_size=16, max_positions=16)
    hf.save(whole, model, jax.device_get(model.init(jax.random.key(0))), kind="causal")
    import safetensors.torch

    torch.save(safetensors.torch.load_file(whole / "model.safetensors"), whole / "pytorch_model.bin")
    with zipfile.ZipFile(whole / "pytorch_model.bin") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    return Checkpoint(folder, {path.name: path.read_bytes() for path in whole.iterdir()}, members)


def load_with(checkpoint, weights: str, content: bytes, config: bytes | None = None) -> None:
    folder, files, _ = checkpoint
    for path in folder.iterdir():
        path.unlink()
    (folder / "config.json").write_bytes(files["config.json"] if config is None else config)
    (folder / weights).write_bytes(content)
    with nothing_but_a_user_error():
        hf.load(folder, kind="causal")


def test_the_files_that_are_damaged_below_can_be_read(checkpoint):
    folder, files, _ = checkpoint
    for name in ("model.safetensors", "pytorch_model.bin"):
        load_with(checkpoint, name, files[name])
        hf.load(folder, kind="causal")


@fuzz
@given(st.data())
def test_any_safetensors_file_is_read_or_refused(checkpoint, choose):
    whole = checkpoint[1]["model.safetensors"]
    length = int.from_bytes(whole[:8], "little")
    if choose.draw(st.booleans()):  # a header of the right length that says something else
        header = choose.draw(damaged(whole[8 : 8 + length]))
        content = len(header).to_bytes(8, "little") + header + whole[8 + length :]
    else:
        head = choose.draw(damaged(whole[: 8 + length + 16]))
        content = head + whole[8 + length + 16 :] * choose.draw(st.booleans())
    load_with(checkpoint, "model.safetensors", content)


@fuzz
@given(st.data())
def test_any_bin_file_is_read_or_refused(checkpoint, choose):
    _, files, members = checkpoint
    if choose.draw(st.integers(0, 3)) == 0:  # the zip archive itself
        content = choose.draw(damaged(files["pytorch_model.bin"]))
    else:  # the pickle, or a tensor, in an archive that is right
        name = choose.draw(
            st.sampled_from(sorted(members, key=lambda name: "data.pkl" not in name)[:1] * 4 + sorted(members))
        )
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for member, inside in members.items():
                archive.writestr(member, choose.draw(damaged(inside)) if member == name else inside)
        content = buffer.getvalue()
    load_with(checkpoint, "pytorch_model.bin", content)


@fuzz
@given(st.data())
def test_any_config_of_a_checkpoint_is_read_or_refused(checkpoint, choose):
    _, files, _ = checkpoint
    fields = json.loads(files["config.json"])
    if choose.draw(st.booleans()):
        fields[choose.draw(st.sampled_from(sorted(fields)) | words)] = choose.draw(json_values)
        config = as_json(fields)
    else:
        config = choose.draw(damaged(files["config.json"]))
    load_with(checkpoint, "model.safetensors", files["model.safetensors"], config)


# --- answers of a reward server


class Answers:
    """A server on loopback that answers each request with the bytes in `answer`, and closes."""

    def __init__(self):
        self.answer = b""
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/score"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                head = b""
                while b"\r\n\r\n" not in head:
                    head += connection.recv(65536)
                left = int(re.search(rb"content-length: (\d+)", head.lower())[1]) - len(head.partition(b"\r\n\r\n")[2])
                while left > 0:
                    left -= len(connection.recv(left))
                connection.sendall(self.answer)

    def close(self):
        self._socket.close()


@pytest.fixture(scope="module")
def answering():
    server, before = Answers(), os.environ.get("FUZZED_TOKEN")
    os.environ["FUZZED_TOKEN"] = SECRET
    yield server
    server.close()
    os.environ.pop("FUZZED_TOKEN") if before is None else os.environ.update(FUZZED_TOKEN=before)


statuses = st.sampled_from(
    [
        "200 OK",
        "200 OK",
        "200",
        "201 \x1b[31m",
        "204 No",
        "301 Moved",
        "404 " + SECRET,
        "429 Wait",
        "500 x",
        "999 y",
        "100 Go on",
        "-1 z",
        "two",
    ]
)
scores = st.lists(st.floats() | json_values | st.just(1.5), max_size=4)
bodies = (
    st.builds(lambda key, value: as_json({key: value}), st.sampled_from(["scores", "rewards", "error"]), scores)
    | json_values.map(as_json)
    | st.binary(max_size=60)
    | st.sampled_from([SECRET.encode(), as_json({"error": SECRET}), b'{"scores": [1, 2]}', b"[" * 100_000])
)
header_names = st.sampled_from(["Retry-After", "Location", "Content-Type", "X", "Content-Encoding"])
header_values = st.text(st.characters(max_codepoint=255, exclude_characters="\r\n"), max_size=20) | st.sampled_from(
    ["Fri, 31 Dec 9999 23:59:59 -2359", "Mon, 99 Foo", "http://elsewhere/" + SECRET, "1e400", "-5", "nan"]
)


@st.composite
def answers(draw) -> bytes:
    body = draw(bodies)
    if draw(st.integers(0, 3)) == 0:
        chunk = f"{draw(st.sampled_from([len(body), 0, 10**9, -1]))!s:.9}".encode()
        head, body = "Transfer-Encoding: chunked", chunk + b"\r\n" + body + b"\r\n0\r\n\r\n"
    else:
        head = f"Content-Length: {draw(st.sampled_from([len(body)] * 3 + [10**6, -1, 0, 'x', '9' * 5000]))}"
    extra = "".join(f"{draw(header_names)}: {draw(header_values)}\r\n" for _ in range(draw(st.integers(0, 2))))
    whole = f"HTTP/1.1 {draw(statuses)}\r\n{extra}{head}\r\n\r\n".encode("latin-1") + body
    return draw(damaged(whole)) if draw(st.integers(0, 2)) == 0 else whole


@fuzz
@given(answers())
def test_any_answer_of_a_reward_server_is_scores_or_a_failure_without_the_token(answering, answer):
    answering.answer = answer
    function = RemoteReward(answering.url, timeout=10, retries=0, token_env="FUZZED_TOKEN")
    try:
        found = asyncio.run(function(["a", "b"], ["c", "d"]))
        assert len(found) == 2 and all(score is None or abs(float(score)) < 3.5e38 for score in found)
    except RewardFailure as error:
        said = str(error)
        assert text.printable(said) == said and len(said) < 3000
        assert SECRET not in said and json.dumps(SECRET)[1:-1] not in said
