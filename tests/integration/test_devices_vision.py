"""Prompts with images on eight (forced host) devices: the tokens and the models of one."""

import json
import pathlib
import sys

import pytest

from tests.helpers.children import child

pytestmark = pytest.mark.processes
ONE, MANY = "1x1x1", "2x2x2"
UPDATES, BATCH = 2, 16


# --- what runs in a process with so many devices: python -m tests.integration.test_devices_vision FOLDER MESH


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


def main(folder: str, mesh: str) -> None:
    """Writes MESH.json."""
    pathlib.Path(folder, f"{mesh}.json").write_text(json.dumps(train_on(pathlib.Path(folder), mesh)))


# --- what must hold


def test_every_mesh_samples_the_same_tokens_and_leaves_the_same_models(tmp_path):
    from rlhf_jax.models.io import hf
    from tests.helpers.arrays import distance

    children = [
        child("tests.integration.test_devices_vision", tmp_path, m, devices=n) for m, n in ((ONE, 1), (MANY, 8))
    ]
    for run in children:
        output, _ = run.communicate(timeout=900)
        assert run.returncode == 0, output[-5000:]
    one, many = (json.loads((tmp_path / f"{mesh}.json").read_text()) for mesh in (ONE, MANY))
    assert len(one) == UPDATES and one == many
    one, many = (hf.load(tmp_path / mesh / "policy", images=True)[1] for mesh in (ONE, MANY))
    assert distance(many, one) <= 1e-4


if __name__ == "__main__":
    main(*sys.argv[1:])
