"""SFT and reward stages on conversations, and what their exports say of generation."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers

from rlhf_jax import data
from rlhf_jax.algorithms import sft
from rlhf_jax.config import RewardConfig, RLOOConfig, SFTConfig, resolve
from rlhf_jax.dry_run import memory
from rlhf_jax.errors import UserError
from rlhf_jax.models import custom_shape
from rlhf_jax.models.io import generation_config, hf
from rlhf_jax.parallel import sharding
from rlhf_jax.stages import open_stage
from tests.helpers.chat_tokenizer import assistant, user
from tests.helpers.runs import OPTIONS, RLOO_OPTIONS, TEXTS

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
    params, model = stage.state.params["model"], stage.network.model
    losses = jax.jit(lambda p, *rows: sft.token_losses(model, p, *rows, dtype=jnp.float32))(
        params, batch.tokens, batch.lengths
    )
    expected = np.asarray(losses)[batch.loss_mask[:, 1:]].mean()
    _, metrics, _ = stage.train_step(stage.state, 0)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    said = [stage.tokenizer.decode(row[own]) for row, own in zip(batch.tokens, batch.loss_mask, strict=True)]
    eos = stage.tokenizer.hf.eos_token
    assert said[0].replace(eos, "|").split("|")[1:] == [" lost keys", ""]


def test_packed_sft_has_the_losses_of_unpacked_rows():
    """Of an update over all rows, and of evaluation, whichever of the two sets is packed."""
    found = []
    for options in ({}, {"packing": True, "eval_packing": False}, {"packing": True}):
        rows = 3 if options else len(MESSAGES)
        config = {**FIXED, "assistant_only_loss": True, **options, "batch_size": rows, "micro_batch_size": 1}
        stage = open_stage(resolve(SFTConfig(**config)), train_dataset=MESSAGES, eval_dataset=MESSAGES)
        state, metrics, _ = stage.train_step(stage.state, 0)
        found.append([float(metrics["loss"]), stage.evaluate(state)["eval/loss"]])
        if options:
            assert len(stage.train_data) == rows
    np.testing.assert_allclose(found[1:], [found[0]] * 2, rtol=1e-5)


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


def chat_model(folder):
    """A checkpoint that ends a turn by either of two ids, as its generation_config.json and config.json say."""
    tokenizer = data.load_tokenizer("synthetic")
    model, ids = custom_shape("1x16x2", 128 * -(-tokenizer.vocab_size // 128)), [tokenizer.eos_id, 5]
    hf.save(folder, model, model.init(jax.random.key(0)), kind="causal", extra_config={"eos_token_id": ids})
    data.save_tokenizer(tokenizer, str(folder))
    content = {"eos_token_id": ids, "pad_token_id": tokenizer.pad_id, "temperature": 0.6, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(content))
    return content


def generation(folder):
    """(generation_config.json, eos_token_id of config.json; None for an adapter) as transformers reads them."""
    ours = json.loads((pathlib.Path(folder) / "generation_config.json").read_text())
    theirs = transformers.GenerationConfig.from_pretrained(folder)
    assert {name: getattr(theirs, name) for name in ours} == ours
    if not (pathlib.Path(folder) / "config.json").exists():
        return ours, None
    return ours, transformers.AutoConfig.from_pretrained(folder).eos_token_id


@pytest.mark.parametrize("form", [{}, {"use_peft": True}, {"use_peft": True, "export_merged": False}], ids=str)
def test_policies_of_a_chain_of_stages_keep_the_ids_that_end_a_turn_of_their_base(tmp_path, form):
    base = chat_model(tmp_path / "start")
    ids, start = base["eos_token_id"], {"model_name_or_path": str(tmp_path / "start"), "scratch_model": None}
    sft_config = SFTConfig(**{**FIXED, **start, **form})
    stage = open_stage(resolve(sft_config), train_dataset=MESSAGES)
    exported = stage.export(stage.state, str(tmp_path / "sft"))
    for path in exported.values():
        assert generation(path) == (base, None if (pathlib.Path(path) / "adapter_config.json").exists() else ids)

    start = {"sft_model_path": exported["policy"], "scratch_model": None, "num_generations": 2}
    options = {**RLOO_OPTIONS, **start, **form, "reward_funcs": ("rlhf_jax.data.synthetic:gold_reward",)}
    stage = open_stage(resolve(RLOOConfig(**options, stop_token_ids="generation_config")))
    assert stage.tokenizer.eos_ids == tuple(ids)
    assert generation(stage.export(stage.state, str(tmp_path / "rloo"))["policy"])[0] == base
    stage = open_stage(resolve(RLOOConfig(**options)))  # stops at eos alone, and leaves the file as it is
    assert generation(stage.export(stage.state, str(tmp_path / "plain"))["policy"])[0] == base
    stage = open_stage(resolve(RLOOConfig(**options, stop_token_ids=(5, 6))))
    changed = generation(stage.export(stage.state, str(tmp_path / "other"))["policy"])
    assert changed[0] == {**base, "eos_token_id": [5, 6]} and changed[1] in ([5, 6], None)


def test_a_policy_from_random_weights_has_ids_that_end_a_response_for_the_next_stage(tmp_path):
    stage = open_stage(resolve(SFTConfig(**FIXED)), train_dataset=MESSAGES)
    exported = stage.export(stage.state, str(tmp_path / "sft"))["policy"]
    found = generation_config.resolve_stop_ids("generation_config", path=exported, revision=None, rows=128)
    assert found == (stage.tokenizer.eos_id,)
