"""A user's files, and the command run on them once they are spoilt."""

import pathlib
import shutil

import pytest

from rlhf_jax import train
from tests.helpers.user_files import UserFiles, arguments, make_user_files


@pytest.fixture(scope="module")
def user_files(tmp_path_factory) -> UserFiles:
    return make_user_files(tmp_path_factory.mktemp("user"))


@pytest.fixture
def refusal(user_files, tmp_path, capsys):
    """Runs the command with these options changed; the message that it ends with. Nothing may be left behind."""

    def refused(stage: str = "ppo", **options) -> str:
        run_dir = pathlib.Path(options.pop("run_dir", tmp_path / "run"))
        before = sorted(run_dir.rglob("*")) if run_dir.is_dir() else run_dir.exists()
        status = train.main(arguments(user_files, stage, run_dir, **options))
        said = capsys.readouterr().err
        assert status == 2, said
        after = sorted(run_dir.rglob("*")) if run_dir.is_dir() else run_dir.exists()
        assert after == before, "a run that cannot start leaves nothing behind"
        assert said.count("error: ") == 1 and "Traceback" not in said
        return said[said.index("error: ") :]

    return refused


@pytest.fixture
def tokenizer_folder(user_files, tmp_path):
    """A folder with the built-in tokenizer's files only, free to spoil."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for path in user_files.sft.iterdir():
        if "token" in path.name:
            shutil.copy(path, folder)
    return folder
