"""Compiled programs are kept on disk by the command, where JAX was not told otherwise."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from rlhf_jax.runtime import compile_cache
from tests.helpers import programs
from tests.helpers.paths import ROOT

NAMES = (
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_enable_compilation_cache",
)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """JAX without a cache, and an empty cache folder of the user's."""
    before = {name: getattr(jax.config, name) for name in NAMES}
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)


def test_programs_go_to_the_users_cache(home):
    place = compile_cache.enable()
    assert pathlib.Path(place).is_dir() and pathlib.Path(place).is_relative_to(home / "rlhf_jax")
    assert jax.config.jax_compilation_cache_dir == place
    assert place == str(compile_cache.folder())


def test_a_program_that_a_killed_process_wrote_in_part_is_compiled_and_kept_again(home):
    program = "import jax; from rlhf_jax.runtime import compile_cache as c; c.MIN_COMPILE_SECONDS = 0.0; c.enable(); "
    program += "jax.jit(lambda x: x * {})(jax.numpy.ones(3))"

    def start(number):
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        command = [sys.executable, "-c", program.format(number)]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stderr

    start(3)
    (kept,) = compile_cache.folder().glob("jit__lambda*-cache")
    whole = kept.read_bytes()
    kept.write_bytes(whole[:100])
    kept.with_name(kept.name.replace("-cache", "-atime")).unlink()
    assert "Error" not in start(4)  # another program is kept beside it
    assert "Error" not in start(3)
    assert len(list(compile_cache.folder().glob("jit__lambda*-cache"))) == 2 and len(kept.read_bytes()) == len(whole)


def test_a_place_that_jax_was_told_stays(home):
    jax.config.update("jax_compilation_cache_dir", str(home / "mine"))
    assert compile_cache.enable() is None
    assert jax.config.jax_compilation_cache_dir == str(home / "mine")


def test_jax_may_be_told_to_keep_nothing(home):
    jax.config.update("jax_enable_compilation_cache", False)
    assert compile_cache.enable() is None and not list(home.iterdir())


def test_a_home_that_cannot_be_written_is_no_error(home, monkeypatch):
    (home / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "file"))
    assert compile_cache.enable() is None
    assert jax.config.jax_compilation_cache_dir is None


def test_a_folder_that_others_may_write_is_not_used(home, capsys):
    compile_cache.folder().mkdir(parents=True)
    compile_cache.folder().chmod(0o777)
    assert compile_cache.enable() is None and jax.config.jax_compilation_cache_dir is None
    assert f"other users may write {compile_cache.folder()}" in capsys.readouterr().err


def test_another_processor_has_a_folder_of_its_own(home, monkeypatch):
    own = compile_cache.folder()
    monkeypatch.setattr(compile_cache.environment.platform, "machine", lambda: "another")
    assert compile_cache.folder().parent == own.parent and compile_cache.folder() != own


def test_other_flags_of_xla_have_a_folder_of_their_own(home):
    folders = {compile_cache.folder(flags=flags) for flags in ("", "--xla_a=1", "--xla_a=2")}
    assert len(folders) == 3 and compile_cache.folder() in folders
    assert {path.parent for path in folders} == {home / "rlhf_jax" / "compiled"}
    assert compile_cache.folder("another").parent == home / "another"


def test_the_programs_of_tests_that_were_not_read_for_longest_are_removed(home):
    paths = [home / programs.NAME / folder / f"{name}-cache" for folder, name in ("ax", "ay", "bz")]
    for day, path in enumerate(paths, start=1):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(100))
        os.utime(path, (day * 86_400, day * 86_400))
    os.utime(paths[0], (9 * 86_400, 86_400))  # read lately
    programs.remove_oldest(250)
    assert [path.exists() for path in paths] == [True, False, True]


def test_the_second_start_of_a_command_finds_its_programs(tmp_path):
    """The loop of the command is not needed for that: what it switches on before."""
    code = """
import jax, jax.numpy as jnp
from rlhf_jax.runtime import compile_cache
compile_cache.enable()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
seen = []
jax.monitoring.register_event_listener(lambda name, **_: seen.append(name))
jax.jit(lambda x: jnp.tanh(x) @ x)(jnp.ones((8, 8))).block_until_ready()
print(seen.count("/jax/compilation_cache/cache_hits"), seen.count("/jax/compilation_cache/cache_misses"))
"""
    env = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"} | {"XDG_CACHE_HOME": str(tmp_path)}
    runs = [
        subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout.split()
        for _ in range(2)
    ]
    (hits, misses), (hits_again, misses_again) = (map(int, run) for run in runs)
    assert hits == 0 and misses > 0
    assert hits_again == misses and misses_again == 0


def test_the_clock_hears_of_a_new_program_and_not_of_an_old_one():
    clock, program = compile_cache.CompileTimer(), jax.jit(lambda x: x * 3 + 5)
    assert clock.since_last() == 0
    program(jnp.ones(3))
    assert clock.since_last() > 0
    program(jnp.ones(3))
    assert clock.since_last() == 0
    clock.close()
    jax.jit(lambda x: x * 5 + 3)(jnp.ones(3))
    assert clock.seconds == 0
