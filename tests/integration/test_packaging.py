"""What is installed is what is in the checkout: a wheel has the package, its configs and its licence."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

from tests.helpers.paths import PACKAGE, ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
    """A wheel of the checkout, built in a copy (setuptools leaves a build folder behind) and without a network."""
    copy = tmp_path_factory.mktemp("copy")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ("rlhf_jax", "configs"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignore)
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy / file)
    build = "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=copy, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return copy / "dist" / done.stdout.split()[-1]


def test_the_wheel_holds_every_file_of_the_package_config_and_the_licence(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    configs = {f"rlhf_jax/configs/{path.name}" for path in (ROOT / "configs").glob("*.py")}
    assert {path.relative_to(ROOT).as_posix() for path in files} | configs <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {path.suffix for path in files} >= {".py", ".css", ".js", ".toml", ".typed"}
    assert not [name for name in names if name.startswith(("tests/", "configs/"))]


def test_configs_are_found_from_an_installed_wheel_as_a_package_too(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import rlhf_jax.configs.tldr_ppo as c; from rlhf_jax.config import files; print(files.config_folder()); "
        "print(files.load_config('tldr_ppo.py:6.9b') == c.get_config('6.9b'), *files.shipped_configs()); "
        "from rlhf_jax.metrics import catalog; assert catalog.explain('objective/kl')"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    folder, found = done.stdout.splitlines()
    assert pathlib.Path(folder) == tmp_path / "site" / "rlhf_jax" / "configs"
    assert found.split()[0] == "True" and "quickstart.py" in found.split()


def test_the_page_on_running_says_what_each_extra_is_for(wheel):
    (metadata,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/METADATA"))
    extras = re.findall(r"^Provides-Extra: (\S+)$", zipfile.ZipFile(wheel).read(metadata).decode(), re.M)
    table = (ROOT / "docs" / "running.md").read_text(encoding="utf-8").split("| extra | for |")[1].split("\n\n")[0]
    assert len(extras) > 10
    assert sorted(re.findall(r"`([\w-]+)`", "".join(line.split("|")[1] for line in table.splitlines()[2:]))) == sorted(
        extras
    )


def test_the_version_is_one():
    import rlhf_jax

    assert re.search(r'version="(.*?)"', (ROOT / "setup.py").read_text()).group(1) == rlhf_jax.__version__


def test_readme_and_ci_run_the_same_commands():
    readme = (ROOT / "README.md").read_text()
    for marker in ("tests", "quickstart"):
        command = re.search(rf"^<!-- {marker} -->\n```\w*\n(.*?)\n```$", readme, re.M | re.S).group(1)
        assert "\n" not in command and command.startswith("python3 -m venv .venv && .venv/bin/pip install ")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "<!-- tests -->" in (ROOT / ".ci" / "run").read_text()
