"""Training on guided responses: all match, whatever the algorithm, and log-probabilities of both kinds."""

import dataclasses
import re

import jax
import numpy as np
import pytest

import rlhf_jax
from rlhf_jax.config import GRPOConfig, PPOConfig, RLOOConfig
from rlhf_jax.errors import UserError
from rlhf_jax.stages import open_stage
from tests.helpers.made_data import write_jsonl
from tests.helpers.runs import compilations, lines, rollout_of

FORM = r"<think>[0-9]{1,6}</think>(\\boxed\{[0-9]+\})?"
FORMS = (FORM, "1+", "")
OPTIONS = {
    "sft_model_path": None,
    "scratch_model": "1x16x2",
    "tokenizer_name_or_path": "arithmetic",
    "dataset_name": "arithmetic",
    "reward_model_path": None,
    "query_length": 16,
    "length_buckets": (16,),
    "response_length": 8,
    "max_train_samples": 32,
    "max_eval_samples": 4,
    "batch_size": 8,
    "total_episodes": 16,
    "learning_rate": 1e-3,
    "num_sample_generations": 0,
    "dataset_test_split": None,
    "report_to": (),
    "save_steps": 0,
    "structured_outputs_regex": FORM,
}
SAMPLER = {"structured_outputs_logprobs": "constrained", "old_logprobs": "sampler"}
ALGORITHMS = {
    "ppo": (PPOConfig, {"value_model": "shared_backbone", "micro_batch_tokens": 128, "num_sample_generations": 1}),
    "rloo": (RLOOConfig, {"num_generations": 4, "decode_slots": 4, "draft": "ngram", **SAMPLER}),
    "grpo with a correction": (
        GRPOConfig,
        {
            "num_generations": 4,
            "beta": 0.04,
            "importance_sampling_correction": True,
            "structured_outputs_logprobs": "constrained",
        },
    ),
    "grpo in parts": (GRPOConfig, {"num_generations": 4, "rollout_max_steps": 3, "total_episodes": 48, **SAMPLER}),
}


def config_of(name, folder, **options):
    config, own = ALGORITHMS[name]
    return config(run_dir=str(folder), **{**OPTIONS, **own, **options})


@pytest.mark.parametrize("name", ["rloo", "grpo in parts"])  # those of the others: in the test below
def test_every_response_of_a_run_matches(tmp_path, name):
    seen = []

    def digits(completions, **_):
        seen.extend(completions)
        return [float(len(text)) for text in completions]

    rlhf_jax.run(config_of(name, tmp_path / "run"), reward_funcs=[digits])
    assert len(seen) >= 16 and all(re.fullmatch(FORM, text) for text in seen)
    metrics = lines(tmp_path / "run")
    assert all(np.isfinite(row["loss/policy_avg"]) for row in metrics if "loss/policy_avg" in row)


@pytest.mark.parametrize("name", ["ppo", "rloo", "grpo with a correction"])
def test_constrained_log_probabilities_are_the_samplers(tmp_path, name):
    """The first step's ratio of learner to sampler is 1; of all tokens it is far from it. All responses match."""
    seen = []

    def length(completions, **_):
        seen.extend(completions)
        return [float(len(text)) for text in completions]

    differences = {}
    for which in ("constrained", "unconstrained"):
        options = {"structured_outputs_logprobs": which, "old_logprobs": "forward", "total_episodes": 8}
        options |= {"importance_sampling_correction": False} if name.startswith("grpo") else {}
        rlhf_jax.run(config_of(name, tmp_path / which, **options), reward_funcs=[length])
        (row,) = [row for row in lines(tmp_path / which) if row["step"] == 1]
        differences[which] = row["sampling/sampling_logp_difference/max"]
        assert np.isfinite(row["loss/policy_avg"])
    assert differences["constrained"] < 1e-5 and differences["unconstrained"] > 1.0
    assert len(seen) >= 16 and all(re.fullmatch(FORM, text) for text in seen)


def sums(folder, forms, name="rows.jsonl"):
    rows = [{"prompt": f"Compute {i % 10}+{i % 7}:\n", "form": form} for i, form in enumerate(forms)]
    return write_jsonl(folder / name, rows)


def test_each_row_may_have_an_expression_of_its_own(tmp_path):
    column = {"structured_outputs_regex": None, "structured_outputs_regex_column": "form"}
    data = {"dataset_name": sums(tmp_path, FORMS * 6), "eval_dataset_name": sums(tmp_path, FORMS, "held_out.jsonl")}
    seen = []

    def reward(completions, form, **_):
        seen.extend(zip(completions, form))
        return [float(len(text)) for text in completions]

    options = {**column, **data, "dataset_test_split": "validation", "eval_on_start": True, "temperature": 1.0}
    options |= {"structured_outputs_logprobs": "unconstrained", "old_logprobs": "forward"}
    rlhf_jax.run(config_of("rloo", tmp_path / "run", **options), reward_funcs=[reward])
    assert {form for _, form in seen} == set(FORMS)
    assert all(re.fullmatch(form, text) for text, form in seen if form)
    free = [text for text, form in seen if not form]
    assert any(not re.fullmatch(FORM, text) and not re.fullmatch("1+", text) for text in free)


def test_a_run_compiles_as_many_programs_as_without_an_expression(tmp_path):
    counts = {}
    for form in (FORM, None):
        config = config_of("rloo", tmp_path / str(form is None), structured_outputs_regex=form)
        stage = open_stage(config, reward_funcs=[lambda completions, **_: [0.0] * len(completions)])
        for _ in range(2):
            rollout_of(stage, stage._prompts(0), group_size=4)
        counts[form] = compilations(stage, ("generate",))
    assert counts[FORM] == counts[None] == {"generate": 1}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"structured_outputs_regex": "("}, "structured_outputs_regex: '(' is no regular expression"),
        ({"structured_outputs_regex": r"\bx"}, "has an anchor or a word boundary inside of it"),
        ({"structured_outputs_regex_column": "form"}, "exclude each other: give only one"),
        ({"stop_token": None}, "needs a token that ends responses: set stop_token eos"),
        ({"structured_outputs_logprobs": "unconstrained"}, "set structured_outputs_logprobs constrained"),
        ({"structured_outputs_regex": None, "structured_outputs_logprobs": "constrained"}, "needs structured_outputs"),
        ({"structured_outputs_regex": "={9}"}, "needs at least 9 tokens; a response has at most 8"),
        ({"structured_outputs_regex": "é"}, "no sequence of the tokenizer's tokens matches the regular expression 'é'"),
    ],
)
def test_what_cannot_be_sampled_is_refused_before_training(tmp_path, options, says):
    with pytest.raises(UserError) as error:
        rlhf_jax.run(config_of("rloo", tmp_path / "run", **options), reward_funcs=[lambda completions, **_: [0.0]])
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("forms", "says"),
    [
        ((None,), None),
        ((1, 2), "rows.jsonl, row 0: column 'form' (structured_outputs_regex_column) is 1; it must be a regular"),
        (("a(",), "'a(' is no regular expression: missing )"),
    ],
)
def test_a_rows_expression_is_checked_before_training(tmp_path, forms, says):
    options = {"structured_outputs_regex": None, "structured_outputs_regex_column": "form"}
    options |= {"dataset_name": sums(tmp_path, forms * 8), "dataset_test_split": None}
    config = config_of("rloo", tmp_path / "run", **options)
    rewards = [lambda completions, **_: [0.0] * len(completions)]
    if says is None:
        assert open_stage(config, reward_funcs=rewards).automaton is not None
        config = dataclasses.replace(config, structured_outputs_regex_column="shape")
        says = "has no column 'shape' (structured_outputs_regex_column); it has form"
    with pytest.raises(UserError) as error:
        open_stage(config, reward_funcs=rewards)
    assert says in str(error.value)


def test_the_tables_are_arguments_of_the_programs(tmp_path):
    """No constant of a compiled program: another expression of the same size needs no other program."""
    config = config_of("rloo", tmp_path)
    stage = open_stage(config, reward_funcs=[lambda completions, **_: [0.0] * len(completions)])
    prompts = stage.programs.place(stage._prompts(0))
    lowered = stage.programs.jitted.generate.lower(
        policy=stage.state.params["policy"],
        base=None,
        prompts=prompts,
        seed=stage.state.seed,
        step=stage.state.step,
        rollout_state=None,
        begun=None,
        automaton=stage.automaton,
        temperature=0.7,
        greedy=False,
        group_size=4,
    )
    sizes = {leaf.shape for leaf in jax.tree.leaves(stage.automaton)}
    arguments = {leaf.shape for leaf in jax.tree.leaves(lowered.args_info)}
    assert sizes <= arguments
