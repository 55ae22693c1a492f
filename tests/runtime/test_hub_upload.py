"""--push_to_hub against a hub on loopback: what arrives there, what is refused before a run and what only warned of."""

import pathlib
import shutil
import time
from types import SimpleNamespace

import huggingface_hub.constants
import huggingface_hub.utils._http
import pytest

import rlhf_jax
from rlhf_jax import storage, train
from rlhf_jax.errors import UserError
from rlhf_jax.runtime import hub_upload
from tests.helpers import buckets
from tests.helpers.hub import Hub
from tests.helpers.runs import sft_config

TOKEN = "hf_0a1b2c3d4e"


@pytest.fixture
def hub(monkeypatch):
    with Hub() as hub:
        hub.users[TOKEN] = "maya"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield hub


def exporting(finished, folder, **options):
    """The config of a run that has only its models to write yet: a copy of a finished one."""
    shutil.copytree(finished.run_dir, folder, ignore=shutil.ignore_patterns("policy", "finished.json"))
    return sft_config(folder, **{"push_to_hub": True, **options})


def named(run_dir, stage="ppo", **options):
    given = {"push_to_hub": True, "hub_model_id": None, "run_dir": run_dir, **options}
    return hub_upload.repository(SimpleNamespace(**given), stage)


def test_a_finished_run_uploads_its_policy_with_tokenizer_and_card(golden_sft, hub, tmp_path, capsys):
    result = rlhf_jax.run(exporting(golden_sft, tmp_path / "my_sft", hub_private_repo=True))
    _, files = hub.find("model", "maya/my_sft", "main")
    folder = pathlib.Path(result.paths["policy"])
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= set(files)
    assert all((folder / name).read_bytes() == content for name, content in files.items())
    assert hub.private == {"maya/my_sft"}
    said = capsys.readouterr()
    assert f"uploaded {folder} to {hub.endpoint}/maya/my_sft" in said.out
    assert TOKEN not in said.out + said.err + (tmp_path / "my_sft" / "config.json").read_text()


def test_names_are_those_given_or_the_folders(hub):
    assert named("runs/tldr") == "maya/tldr"
    assert named("runs/quickstart/ppo") == "maya/quickstart-ppo"
    assert named("runs/x", hub_model_id="y") == "maya/y" and named("runs/x", hub_model_id="lab/y") == "lab/y"
    assert named("runs/x", push_to_hub=False) is None
    with pytest.raises(UserError, match="--hub_model_id lab/a b"):
        named("runs/x", hub_model_id="lab/a b")


@pytest.mark.parametrize("token", [None, "hf_wrong"])
def test_a_run_without_a_token_that_the_hub_knows_does_not_begin(golden_sft, hub, tmp_path, monkeypatch, token):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UserError, match="--push_to_hub: .*hf auth login") as refused:
        rlhf_jax.run(sft_config(tmp_path / "run", push_to_hub=True))
    assert not (tmp_path / "run").exists() and "hf_wrong" not in str(refused.value)
    assert train.run(exporting(golden_sft, tmp_path / "run", push_to_hub=False)).paths  # nobody is asked


@pytest.mark.parametrize(
    ("options", "status", "said"), [({}, 500, "tired"), ({"hub_model_id": "noah/policy"}, None, "rights")]
)
def test_an_upload_that_fails_costs_a_warning_and_says_how_to_do_it_later(
    golden_sft, hub, tmp_path, monkeypatch, capsys, options, status, said
):
    hub.refused = status
    monkeypatch.setattr(
        huggingface_hub.utils._http, "time", SimpleNamespace(time=time.time, sleep=lambda seconds: None)
    )
    result = rlhf_jax.run(exporting(golden_sft, tmp_path / "run", **options))
    warning = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    name = options.get("hub_model_id", "maya/run")
    assert len(warning) == 1 and said in warning[0] and f"hf upload {name} {tmp_path}/run/policy" in warning[0]
    assert (tmp_path / "run" / "finished.json").exists() and pathlib.Path(result.paths["policy"]).is_dir()


@pytest.mark.runs
def test_a_run_in_a_bucket_uploads_its_policy_and_a_failed_upload_names_the_bucket(hub, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    options = {"max_steps": 2, "save_steps": 0, "push_to_hub": True}
    with buckets.in_use("s3"):
        path = train.run(sft_config(f"s3://{buckets.BUCKET}/my_run", **options)).paths["policy"]
        _, files = hub.find("model", "maya/my_run", "main")
        copy = pathlib.Path(storage.local_copy(path))
        assert len(files) > 4 and all((copy / name).read_bytes() == content for name, content in files.items())
        assert f"uploaded {path} to {hub.endpoint}/maya/my_run" in capsys.readouterr().out
        hub.refused = 500
        path = train.run(sft_config(f"s3://{buckets.BUCKET}/other", **options)).paths["policy"]
    (warning,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: "))
    assert (
        warning.startswith(f"warning: {path} was not uploaded to maya/other")
        and "hf upload maya/other FOLDER" in warning
    )
