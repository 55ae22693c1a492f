"""CPU, no silent broadcasting; programs and finished runs for all workers; the slowest files first."""

import atexit
import gc
import os
import pathlib
import shutil
import tempfile

from tests.helpers.children import QUICK
from tests.helpers.reward_server import Server

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", QUICK)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # nothing reads the lines in programs
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
if "HF_DATASETS_CACHE" not in os.environ:  # tokens of this session, for all workers and the processes they start
    os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="rlhf_jax_datasets_")
    atexit.register(shutil.rmtree, os.environ["HF_DATASETS_CACHE"], True)

import jax  # noqa: E402
import pytest  # noqa: E402
from jax._src import pjit  # noqa: E402

from tests.helpers import durations, programs  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session", autouse=True)
def compilation_cache():
    """A compilation cache that the workers, the processes they start and later sessions share.

    JAX_COMPILATION_CACHE_DIR names another folder, or none if empty.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = programs.folder()
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
        jax.config.update("jax_compilation_cache_dir", str(folder))


def pytest_configure(config):
    config.pluginmanager.register(durations.Durations(config))


def pytest_sessionstart(session):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        programs.remove_oldest()


@pytest.fixture(scope="session")
def golden(tmp_path_factory):
    """The runs of helpers/golden.py. Tests ask for one by its own fixture: the run is then made before anything is
    captured or patched for a test."""
    from tests.helpers.golden import Golden  # imports the whole package, which not every test needs

    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    return Golden(folder / "golden")


@pytest.fixture(scope="session")
def golden_sft(golden):
    return golden.sft


@pytest.fixture(scope="session")
def golden_reward(golden):
    return golden.reward


@pytest.fixture(scope="session")
def golden_ppo(golden):
    return golden.ppo


@pytest.fixture(scope="session")
def golden_rloo(golden):
    return golden.rloo


@pytest.fixture(scope="session")
def golden_grpo(golden):
    return golden.grpo


@pytest.fixture(scope="session", autouse=True)
def fewer_collections():
    """What was imported stays, and tracing makes many small objects: to look through them all took a fifth of it."""
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


@pytest.fixture(scope="module", autouse=True)
def room_for_programs():
    """Drops compiled programs before Linux refuses another mapping (65,530 a process), where jaxlib segfaults, and
    before jit's cache of 8,192 signatures is full: then it drops new ones, and a program called twice counts none."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    mappings = maps.read_bytes().count(b"\n") if maps.exists() else 0
    if mappings > 20_000 or signatures() > 4_096:
        jax.clear_caches()
        gc.collect()


def signatures() -> int:
    """Entries in the fuller of jit's caches; each holds at most 8,192, of all jitted functions of a process."""
    return max(cache.size() for name, cache in vars(pjit).items() if name.startswith("_cpp_pjit_cache"))


@pytest.fixture
def missed():
    """An entry for each program that was compiled since JAX's cache on disk did not have it."""
    events = []

    def listen(event, **_):
        if event == "/jax/compilation_cache/cache_misses":
            events.append(event)

    jax.monitoring.register_event_listener(listen)
    yield events
    jax.monitoring.unregister_event_listener(listen)


@pytest.fixture
def server():
    server = Server()
    yield server
    server.close()
