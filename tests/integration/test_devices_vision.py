"""Prompts with images on eight (forced host) devices and on two processes: the tokens and the models of one."""

import json
import pathlib
import socket
import sys

import pytest

from tests.helpers.children import child

pytestmark = pytest.mark.processes
ONE, MANY, PROCESSES = "1x1x1", "2x2x2", "2x1x1"
UPDATES, BATCH = 2, 16


# --- what runs in a process: python -m tests.integration.test_devices_vision FOLDER MESH [ADDRESS ID]


def train_on(folder: pathlib.Path, mesh: str) -> list:
    """A short run on one mesh: what was sampled."""
    import rlhf_jax

    samples = []

    def brevity(prompts, completion_ids, image, **_):
        samples.append([[one.size for one in image], completion_ids])
        return [-0.1 * len(ids) for ids in completion_ids]

    data, fsdp, tensor = map(int, mesh.split("x"))
    config = rlhf_jax.RLOOConfig(
        scratch_model="smolvlm:2x32x4",
        sft_model_path=None,
        reward_model_path=None,
        tokenizer_name_or_path="shapes",
        dataset_name="shapes",
        dataset_test_split=None,
        max_train_samples=64,
        query_length=16,
        response_length=4,
        learning_rate=1e-3,
        adam_epsilon=1e-5,
        num_sample_generations=0,
        num_generations=2,
        batch_size=BATCH,
        micro_batch_size=8,
        total_episodes=UPDATES * BATCH,
        mesh_data=data,
        mesh_fsdp=fsdp,
        mesh_tensor=tensor,
        run_dir=str(folder / mesh),
        report_to=(),
    )
    rlhf_jax.run(config, reward_funcs=brevity)
    return samples


def main(folder: str, mesh: str, address: str | None = None, index: str = "0") -> None:
    """Writes MESH-ID.json."""
    if address is not None:
        from rlhf_jax.parallel import multihost

        multihost.initialize(address, 2, int(index))
    samples = train_on(pathlib.Path(folder), mesh)
    pathlib.Path(folder, f"{mesh}-{index}.json").write_text(json.dumps(samples))


# --- what must hold


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The runs, beside each other."""
    folder, module = tmp_path_factory.mktemp("vision"), "tests.integration.test_devices_vision"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    children = [child(module, folder, mesh, devices=count) for mesh, count in ((ONE, 1), (MANY, 8))]
    children += [child(module, folder, PROCESSES, address, index, devices=1) for index in range(2)]
    for run in children:
        output, _ = run.communicate(timeout=900)
        assert run.returncode == 0, output[-5000:]
    return folder


@pytest.mark.parametrize("mesh, processes", [(MANY, 1), (PROCESSES, 2)])
def test_the_same_tokens_are_sampled_and_the_same_models_left(folder, mesh, processes):
    from rlhf_jax.models.io import hf
    from tests.helpers.arrays import distance

    one, *shares = (
        json.loads((folder / name).read_text())
        for name in (f"{ONE}-0.json", *(f"{mesh}-{index}.json" for index in range(processes)))
    )
    together = [[sum(parts, []) for parts in zip(*step)] for step in zip(*shares, strict=True)]
    assert len(one) == UPDATES and one == together
    first, other = (hf.load(folder / name / "policy", images=True)[1] for name in (ONE, mesh))
    assert distance(other, first) <= 1e-4


if __name__ == "__main__":
    main(*sys.argv[1:])
