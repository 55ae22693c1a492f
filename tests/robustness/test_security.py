"""What docs/security.md promises: nothing but tensors is unpickled, no code comes from data, tokens stay
secret, and the reward server is bounded."""

import ast
import functools
import http.client
import importlib.util
import json
import pathlib
import pickletools
import re
import socket
import struct
import sys
import threading
import time
import warnings
import zipfile

import numpy as np
import pytest

from rlhf_jax import data, train
from rlhf_jax.data.chat import ChatTemplate, ChatTemplateError
from rlhf_jax.errors import UserError
from rlhf_jax.models.io import torch_bin
from rlhf_jax.rewards.server import RemoteReward
from rlhf_jax.runtime import model_card
from tests.helpers.paths import ROOT
from tests.helpers.reward_server import Server, answers, scores
from tests.helpers.user_files import arguments, mentions

SECRET = "tok-en_9f8e7d6c5b4a"

# --- no code from data: what the source calls

MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"}
CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "os.system", "os.popen", "exec_module"}
CALLS |= {"pickle.load", "pickle.loads", "subprocess.getoutput", "subprocess.getstatusoutput", "import_module"}
KEYWORDS = {"trust_remote_code": False, "allow_pickle": False, "shell": False, "weights_only": True}
"""Keywords, and the only value that each may have."""
REASONS = {
    ("rlhf_jax/models/io/torch_bin.py", "pickle"): "an unpickler that admits tensors by name and refuses all else",
    ("rlhf_jax/config/files.py", "exec_module"): "a config is Python that the user names",
    ("rlhf_jax/rewards/interface.py", "exec_module"): "a reward function's file, which the user names",
    ("rlhf_jax/rewards/interface.py", "import_module"): "a reward function's module, which the user names",
    ("rlhf_jax/utils/lazy.py", "import_module"): "modules of this package, when they are first used",
    ("rlhf_jax/cli.py", "import_module"): "modules of this package, by a table of commands",
    ("rlhf_jax/data/images.py", "import_module"): "transformers' image processors, by a table of two classes",
    ("scripts/parity/record_trl.py", "import_module"): "this repository's own recordings",
    ("scripts/parity/parity_sweep.py", "import_module"): "this repository's own recordings",
}


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def dangers(source: str) -> set[str]:
    """What a source uses that can run code out of data."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").split(".")[0]} & MODULES
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            # Methods are matched by the last part, as any object may be what has them; builtins only bare: re.compile.
            found |= {name, name.rpartition(".")[2] if "_" in name else name} & CALLS
            for keyword in node.keywords:
                if keyword.arg in KEYWORDS:
                    value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                    if value is not KEYWORDS[keyword.arg]:
                        found.add(f"{keyword.arg}={ast.unparse(keyword.value)}")
    return found


def test_nothing_in_the_source_runs_code_out_of_data_but_what_has_a_reason():
    skipped = {"tests", *(ROOT / ".gitignore").read_text().replace("/", "").split()}
    folders = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
    files = [*ROOT.glob("*.py"), *(p for folder in folders if folder.name not in skipped for p in folder.rglob("*.py"))]
    assert len(files) > 80
    found = {(path.relative_to(ROOT).as_posix(), use) for path in files for use in dangers(path.read_text())}
    assert found == set(REASONS)


@pytest.mark.parametrize(
    ("source", "use"),
    [
        ("import pickle", "pickle"),
        ("from dill import loads", "dill"),
        ("eval('1')", "eval"),
        ("import torch\ntorch.load('a')", "torch.load"),
        ("loader.exec_module(m)", "exec_module"),
        ("f(trust_remote_code=True)", "trust_remote_code=True"),
        ("np.load(f, allow_pickle=yes)", "allow_pickle=yes"),
        ("subprocess.run('a', shell=True)", "shell=True"),
    ],
)
def test_the_search_finds_what_it_is_for(source, use):
    assert dangers(source) == {use}
    assert dangers("import re\nre.compile('a')\nfn.lower().compile()\nf(allow_pickle=False)") == set()


# --- .bin files


def bin_file(path: pathlib.Path, pickled: bytes, compression: int = zipfile.ZIP_STORED) -> pathlib.Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/data/0", np.arange(6, dtype=np.float32).tobytes())
    return path


def short(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


REBUILD, STORAGE = b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nFloatStorage\n"
PLACE = b"((" + short("storage") + STORAGE + short("0") + short("cpu") + b"K\x06tQ"
EMPTY = b"ccollections\nOrderedDict\n)R"
TENSOR = REBUILD + PLACE + b"K\x00" + b"K\x02K\x03\x86" + b"K\x03K\x01\x86" + b"\x89" + EMPTY + b"tR"


def state_dict(tensor: bytes) -> bytes:
    return b"\x80\x02}" + short("w") + tensor + b"s."


def test_a_handmade_bin_file_is_read(tmp_path):
    found = torch_bin.read(bin_file(tmp_path / "a.bin", state_dict(TENSOR)))
    np.testing.assert_array_equal(found["w"].read(), np.arange(6, dtype=np.float32).reshape(2, 3))


@pytest.mark.parametrize(
    "change",
    [
        b"}" + short("offset") + b"J\xff\xff\xff\x7fsb",
        b"}" + short("shape") + b"J\xff\xff\xff\x7f\x85sb",
        b"N}" + short("offset") + b"J\xff\xff\xff\x7fs\x86b",
        b"N}" + short("strides") + b"J\xff\xff\xff\x7f\x85s\x86b",
    ],
)
def test_a_pickle_cannot_change_a_tensor_after_it_was_checked(tmp_path, change):
    """BUILD sets an object's attributes: numbers beyond the storage would read foreign memory."""
    for spoiled in (TENSOR + change, TENSOR.replace(b"tQ", b"tQ" + change, 1)):
        path = bin_file(tmp_path / "a.bin", state_dict(spoiled))
        with pytest.raises(UserError, match="damaged or not a state dict"):
            torch_bin.read(path)
    # It may give an OrderedDict attributes, as torch does, and that changes nothing.
    given = EMPTY + b"}" + short("_metadata") + EMPTY + b"sb"
    assert torch_bin.read(bin_file(tmp_path / "b.bin", state_dict(TENSOR.replace(EMPTY, given))))["w"].shape == (2, 3)


def test_a_small_bin_file_cannot_fill_the_memory(tmp_path):
    huge = b"\x80\x02}r\xff\xff\xff\x7f."  # its place in the memo: a table of 2^31 entries
    with pytest.raises(UserError, match="memo 2147483647"):
        torch_bin.read(bin_file(tmp_path / "a.bin", huge))
    with pytest.raises(UserError, match="data.pkl.*compressed"):
        torch_bin.read(bin_file(tmp_path / "b.bin", b"0" * 10**6, zipfile.ZIP_DEFLATED))
    deep = b"\x80\x02" + b"N" + b"2\x86" * 60 + b"Q."  # 60 pairs of pairs: 2^60 Nones to write out
    started = time.monotonic()
    with pytest.raises(UserError, match="not a typed tensor storage"):
        torch_bin.read(bin_file(tmp_path / "c.bin", deep))
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("call", ["posix.system", "builtins.eval", "torch._utils._rebuild_parameter", "numpy.load"])
def test_every_other_name_in_a_pickle_is_refused_unread(tmp_path, call):
    module, _, name = call.rpartition(".")
    pickled = f"c{module}\n{name}\n(S'touch {tmp_path / 'trap'}'\ntR.".encode()
    assert [opcode.name for opcode, _, _ in pickletools.genops(pickled)][0] == "GLOBAL"
    with pytest.raises(UserError, match=f"asks for {call}.*nothing was run"):
        torch_bin.read(bin_file(tmp_path / "a.bin", pickled))
    assert not (tmp_path / "trap").exists()


# --- code in the folder of a checkpoint


def test_code_beside_a_tokenizer_is_not_run_and_not_asked_about(tmp_path):
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'trap')!r}, 'w')\nclass T: pass\n")
    config = {"auto_map": {"AutoTokenizer": ["mine.T", None]}, "tokenizer_class": "T", "eos_token": "a"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(UserError, match="no tokenizer could be loaded"):
        data.load_tokenizer(str(tmp_path))
    assert not (tmp_path / "trap").exists()


def test_a_chat_template_reaches_no_python():
    tokenizer = data.load_tokenizer("synthetic")
    for reach in (
        "''.__class__.__mro__[1].__subclasses__()",
        "messages.__class__.__base__",
        "raise_exception.__globals__",
    ):
        template = ChatTemplate(tokenizer, {"chat_template": "{{ " + reach + " }}"})
        with pytest.raises(ChatTemplateError):
            template.render([{"role": "user", "content": "a"}], generation_prompt=False)


# --- tokens


def everything_in(folder: pathlib.Path) -> bytes:
    return b"".join(path.name.encode() + path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def quoting(monkeypatch):
    """A reward server that quotes the token, and environment variables with it."""
    for name in ("RLHF_JAX_REWARD_TOKEN", "HF_TOKEN"):
        monkeypatch.setenv(name, SECRET)
    server = Server()
    server.forever = answers(403, {"error": f"bad token {SECRET}", "fill": "x" * 85 + SECRET}, X_Seen=SECRET)
    yield server
    server.close()


@pytest.mark.parametrize("failure", ["drop", "raise"])
def test_a_token_is_nowhere_in_a_runs_folder_nor_in_the_terminal(user_files, tmp_path, capfd, quoting, failure):
    options = {"reward_model_path": None, "value_model": "shared_backbone", "reward_server": quoting.url}
    options |= {"reward_failure": failure, "log_completions": True, "num_sample_generations": 1}
    options |= {"report_to": "tensorboard", "save_steps": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: print(message, file=sys.stderr)
        status = train.main(arguments(user_files, "ppo", tmp_path / "run", **options))
    said = capfd.readouterr()
    assert quoting.headers and all(SECRET in headers["Authorization"] for headers in quoting.headers)
    assert "bad token ***" in said.err and SECRET not in said.out + said.err
    assert status == (2 if failure == "raise" else 0)
    written = everything_in(tmp_path / "run")
    assert b"reward_server_token_env" in written and SECRET.encode() not in written


def test_a_user_and_password_in_a_url_are_refused_and_not_repeated(refusal, capsys):
    for url in (f"http://user:a@{SECRET}@localhost:1/score", f"ftp://{SECRET}@host/", f"https://{SECRET}@h/?a=b"):
        message = refusal(reward_server=url)
        mentions(message, "reward_server", "reward_server_token_env")
        assert SECRET not in message
        for more in (["--dry_run"], ["too", "many"]):
            assert train.main(["--config", "tldr_ppo.py", "--reward_server", url, *more]) == 2
            shown = capsys.readouterr()
            assert SECRET not in shown.out + shown.err
    assert SECRET not in refusal(dataset_name=f"https://me:{SECRET}@host/data.jsonl")
    assert SECRET not in str(UserError(f"https://me:{SECRET}@host/data.jsonl: no"))


def test_a_model_card_leaves_out_what_a_url_asks():
    config = {"dataset_name": "synthetic", "reward_server": f"https://host/score?key={SECRET}"}
    card = model_card.model_card("policy", "ppo", config, {})
    assert "https://host/score?..." in card and SECRET not in card


def test_a_token_is_redacted_as_a_server_may_quote_it(monkeypatch):
    odd = 's3/cr"et'
    monkeypatch.setenv("RLHF_JAX_REWARD_TOKEN", odd)
    server = Server()
    for body in (
        {"error": odd},
        f"/login?token=s3%2Fcr%22et {odd}".encode(),
        {"scores": [odd, 1]},
        {"scores": [[odd], 1]},
    ):
        server.script.append(answers(200, body))
        with pytest.raises(UserError) as error:
            scores(RemoteReward(server.url, retries=0), ["a", "b"], ["c", "d"])
        assert not re.search(r"s3(/|%2F)cr", str(error.value)), error.value
        assert "***" in str(error.value)
    server.close()


def test_a_token_in_the_clear_to_another_machine_is_warned_of(monkeypatch):
    monkeypatch.setenv("RLHF_JAX_REWARD_TOKEN", SECRET)
    with pytest.warns(UserWarning, match="http://far.example/score"):
        RemoteReward("http://far.example/score")
    monkeypatch.setenv("OTHER", "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for url in ("http://127.0.0.1:1/", "http://[::1]:1/", "http://localhost/", "https://far.example/"):
            RemoteReward(url)
        RemoteReward("http://far.example/score", token_env="OTHER")


def test_a_redirect_to_another_host_gets_neither_rows_nor_token(monkeypatch):
    monkeypatch.setenv("RLHF_JAX_REWARD_TOKEN", SECRET)
    here, other = Server(), Server()
    for status in (301, 302, 303, 307, 308):
        here.script.append(answers(status, b"", Location=f"{other.url}?{SECRET}\x1b[2J"))
        with pytest.raises(
            UserError, match=rf"status {status} .*to {re.escape(other.url)}.*, which is not followed"
        ) as error:
            scores(RemoteReward(here.url, retries=0))
        assert SECRET not in str(error.value) and "\x1b" not in str(error.value)
    assert not other.requests and len(here.requests) == 5
    here.close(), other.close()


# --- the reward server


@functools.cache
def serve_reward():
    spec = importlib.util.spec_from_file_location("serve_reward", ROOT / "scripts" / "serve_reward.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Slow:
    """Scores by length, once `free` is set."""

    def __init__(self):
        self.free, self.asked = threading.Event(), 0

    def scores(self, prompts, completions):
        self.asked += 1
        assert self.free.wait(30)
        return [float(len(completion)) for completion in completions]


@pytest.fixture
def bounded():
    """(scorer, host:port) of the server with 3 connections at a time and 0.5 s for a request to arrive."""
    scorer = Slow()
    server = serve_reward().make_server(scorer, "127.0.0.1", 0, SECRET, max_connections=3, arrival=0.5)
    threading.Thread(target=server.serve_forever, daemon=True, kwargs={"poll_interval": 0.01}).start()
    yield scorer, f"127.0.0.1:{server.server_address[1]}"
    scorer.free.set()
    server.shutdown()
    server.server_close()


def ask(address: str, body=None, token: str | None = SECRET, method: str = "POST", path: str = "/score"):
    """(status, answer)."""
    connection = http.client.HTTPConnection(address, timeout=30)
    raw = json.dumps({"prompts": ["a"], "completions": ["bcd"]} if body is None else body).encode()
    try:
        connection.request(method, path, raw, {} if token is None else {"Authorization": f"Bearer {token}"})
        response = connection.getresponse()
        return response.status, json.load(response)
    finally:
        connection.close()


@pytest.mark.parametrize("token", [None, "", "wrong", SECRET[:-1], SECRET + "x", "t\xf6k"])
def test_without_the_right_token_nothing_is_scored_or_told(bounded, token):
    scorer, address = bounded
    scorer.free.set()
    status, answer = ask(address, token=token)
    assert status == 401 and SECRET not in str(answer) and not scorer.asked
    assert ask(address, method="GET", path="/health", token=token) == (200, {"status": "ok"})
    assert ask(address) == (200, {"scores": [3.0]})


def test_connections_beyond_the_bound_are_sent_away_and_the_others_served(bounded):
    scorer, address = bounded
    found = []
    threads = [threading.Thread(target=lambda: found.append(ask(address))) for _ in range(3)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 20
    while scorer.asked < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with socket.create_connection(address.split(":"), timeout=20) as refused:
        head, _, body = b"".join(iter(lambda: refused.recv(4096), b"")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ") and b"Retry-After: 1" in head
    assert int(re.search(rb"Content-Length: (\d+)", head)[1]) == len(body) and json.loads(body)["error"]
    scorer.free.set()
    for thread in threads:
        thread.join(20)
    assert found == [(200, {"scores": [3.0]})] * 3
    assert ask(address) == (200, {"scores": [3.0]})


def test_bytes_that_trickle_hold_no_connection_for_long(bounded):
    scorer, address = bounded
    scorer.free.set()
    head = f"POST /score HTTP/1.1\r\nAuthorization: Bearer {SECRET}\r\nContent-Length: 1000\r\n\r\n".encode()
    for sent in (b"", b"POST /sco", head, head + b"{"):
        started = time.monotonic()
        with socket.create_connection(address.split(":"), timeout=20) as connection:
            connection.sendall(sent)
            answer = b"".join(iter(lambda: connection.recv(4096), b""))
        assert time.monotonic() - started < 10
        assert sent == b"" or answer == b"" or answer.startswith(b"HTTP/1.1 4") or b"Error code: 4" in answer
        assert not head.startswith(sent) or sent != head or b" 408 " in answer.split(b"\r\n")[0]
    assert ask(address) == (200, {"scores": [3.0]})


def test_scoring_may_take_longer_than_arriving(bounded):
    scorer, address = bounded
    threading.Timer(1.0, scorer.free.set).start()
    assert ask(address) == (200, {"scores": [3.0]})


def test_rows_and_bytes_are_bounded_and_the_token_comes_first(bounded):
    scorer, address = bounded
    scorer.free.set()
    many = serve_reward().MAX_ROWS + 1
    assert ask(address, {"prompts": [""] * many, "completions": [""] * many})[0] == 413
    large = "x" * (serve_reward().MAX_BODY + 1)
    assert ask(address, {"prompts": [large], "completions": [""]})[0] == 413
    assert ask(address, {"prompts": [large], "completions": [""]}, token="wrong")[0] == 401
    assert not scorer.asked


def test_an_error_of_the_server_tells_its_kind_alone(bounded, capsys):
    scorer, address = bounded
    scorer.scores = lambda *_: 1 / 0
    status, answer = ask(address)
    assert status == 500 and answer["error"].startswith("ZeroDivisionError;") and "division" not in answer["error"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--token_env RLHF_JAX_REWARD_TOKEN: this environment variable is not set"),
        (("--no_token", "--host", "0.0.0.0"), "--no_token with --host 0.0.0.0: without a token .*loopback only"),
        (("--no_token", "--host", "::"), "loopback only"),
        (("--no_token", "--max_connections", "0"), "--max_connections is 0"),
    ],
)
def test_it_listens_without_a_token_on_loopback_alone_and_only_when_told(monkeypatch, capsys, arguments, said):
    monkeypatch.delenv("RLHF_JAX_REWARD_TOKEN", raising=False)
    monkeypatch.setattr(sys, "argv", ["serve_reward.py", "--model", "nothing", *arguments])
    assert serve_reward().main() == 2
    assert re.search(f"^error: .*{said}", capsys.readouterr().err, re.MULTILINE)


def test_it_binds_to_loopback_and_its_tokens_are_compared_in_constant_time():
    source = (ROOT / "scripts" / "serve_reward.py").read_text()
    assert '"--host", default="127.0.0.1"' in source
    compared = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Compare)]
    assert not [node for node in compared if {"token", "given"} & {dotted(part) for part in ast.walk(node)}]
    assert "hmac.compare_digest(given" in source
