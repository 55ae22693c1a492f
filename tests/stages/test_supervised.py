"""SFT and reward stages on conversations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.algorithms import sft
from rlhf_jax.config import RewardConfig, SFTConfig, resolve
from rlhf_jax.dry_run import memory
from rlhf_jax.errors import UserError
from rlhf_jax.parallel import sharding
from rlhf_jax.stages import open_stage
from tests.helpers.chat_tokenizer import assistant, user
from tests.helpers.runs import OPTIONS, TEXTS

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}TL;DR:{% generation %} {{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}POST: {{ m.content }}\n\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}TL;DR:{% endif %}"
)
PEOPLE = ("anna", "omar", "lena", "igor") * 2
FIXED = {
    **OPTIONS,
    **TEXTS,
    "model_name_or_path": None,
    "scratch_model": "1x16x2",
    "micro_batch_size": 4,
    "max_steps": 2,
    "dataset_test_split": None,
    "chat_template_kwargs": {"chat_template": TEMPLATE},
}
MESSAGES = [
    {"messages": [user(f"i met {who}."), assistant(f"met {who}"), user("i lost keys."), assistant("lost keys")]}
    for who in PEOPLE
]


def test_sft_learns_what_the_assistant_says():
    stage = open_stage(resolve(SFTConfig(**FIXED, assistant_only_loss=True)), train_dataset=MESSAGES)
    batch = stage.train_data.batch(stage.config.seed, 0, 8)
    assert 0 < batch.loss_mask.sum() < batch.lengths.sum()
    params, model = stage.state.params["model"], stage.model
    losses = jax.jit(lambda p, *rows: sft.token_losses(model, p, *rows, dtype=jnp.float32))(
        params, batch.tokens, batch.lengths
    )
    expected = np.asarray(losses)[batch.loss_mask[:, 1:]].mean()
    _, metrics, _ = stage.train_step(stage.state, 0)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    said = [stage.tokenizer.decode(row[own]) for row, own in zip(batch.tokens, batch.loss_mask, strict=True)]
    eos = stage.tokenizer.hf.eos_token
    assert said[0].replace(eos, "|").split("|")[1:] == [" lost keys", ""]


def test_a_reward_model_learns_from_conversations():
    pairs = [
        {"prompt": [user(f"i met {who}.")], "chosen": [assistant(f"met {who}")], "rejected": [assistant("lost keys")]}
        for who in PEOPLE
    ]
    stage = open_stage(resolve(RewardConfig(**FIXED)), train_dataset=pairs)
    batch = stage.train_data.batch(stage.config.seed, 0, 8)
    assert (batch.chosen_tokens[np.arange(8), batch.chosen_lengths - 1] == stage.tokenizer.eos_id).all()
    _, metrics, _ = stage.train_step(stage.state, 0)
    assert np.isfinite(metrics["loss"])


def test_a_dry_run_plans_the_mask_and_refuses_a_template_without_blocks():
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    stage = memory.abstract_stage(resolve(SFTConfig(**FIXED, assistant_only_loss=True)), mesh)
    given = {}
    stage.trace_programs(lambda name, program, *arguments, resident: given.update({name: arguments}))
    assert given["update"][2].loss_mask.shape == given["update"][2].tokens.shape == (8, 72)
    plain = {**FIXED, "chat_template_kwargs": {"chat_template": "{{ messages[0].content }}"}}
    with pytest.raises(UserError, match="does not mark what the assistant says"):
        memory.abstract_stage(resolve(SFTConfig(**plain, assistant_only_loss=True)), mesh)
