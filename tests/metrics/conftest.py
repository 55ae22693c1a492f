import pytest

from rlhf_jax.runtime.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path):
    return RunFolder.open(str(tmp_path / "ppo"), {"seed": 1})
