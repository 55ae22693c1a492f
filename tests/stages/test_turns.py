"""Responses of several turns: what is sampled, what tools say, and what neither depends on."""

import jax
import numpy as np
import pytest

from rlhf_jax import stages
from rlhf_jax.algorithms.groups import group_rollout
from rlhf_jax.algorithms.response_logprobs import response_logprobs
from rlhf_jax.config import GRPOConfig, PPOConfig
from rlhf_jax.errors import UserError
from rlhf_jax.parallel import sharding
from rlhf_jax.stages import turns
from tests.helpers import tool_tokenizer as tt
from tests.helpers.runs import compilations

LENGTH, BATCH, GROUP = 96, 16, 2
STOPS = tt.SHORT_TURNS
OPTIONS = {
    "run_dir": None,
    "sft_model_path": None,
    "scratch_model": "2x32x2",
    "dataset_test_split": None,
    "query_length": 32,
    "length_buckets": (32,),
    "response_length": LENGTH,
    "batch_size": BATCH,
    "num_generations": GROUP,
    "total_episodes": 2 * BATCH,
    "stop_token_ids": STOPS,
    "temperature": 1.0,
    "num_sample_generations": 0,
    "report_to": (),
    "save_steps": 0,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tt.save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def told(completions, **_):
    """The number of results."""
    return [float(sum(message["role"] == "tool" for message in messages)) for messages in completions]


def stage_of(tokenizer, config=GRPOConfig, *, reward=told, rows=16, **options):
    objects = {name: options.pop(name) for name in ("tools", "environment_factory", "eval_dataset") if name in options}
    data = options.pop("train_dataset", None) or tt.prompts(rows)
    options = {**OPTIONS, "tokenizer_name_or_path": tokenizer, **options}
    if config is PPOConfig:
        options.pop("num_generations")
    objects = {"tools": tt.TOOLS, **objects}
    return stages.open_stage(config(**options), train_dataset=data, reward_funcs=[reward], **objects)


def respond(stage, group=GROUP, **options):
    """The first update's responses."""
    state, prompts = stage.state, stage.train_data.batch(stage.config.seed, 0, BATCH // group)
    sampler = stage.programs.sampler(state.params["policy"], seed=state.seed, step=state.step)
    data = stage.turns, prompts, stage.train_data
    return turns.respond(sampler, stage.programs.place, *data, group_size=group, at="update 1", **options)


def parts(rollout, row):
    """(whether sampled, ids) of the runs of one row's response."""
    length = int(rollout.lengths[row])
    ids, sampled = np.asarray(rollout.response[row])[:length], np.asarray(rollout.sampled[row])[:length]
    cuts = [0, *(np.flatnonzero(np.diff(sampled.astype(int))) + 1), length]
    return [(bool(sampled[a]), ids[a:b].tolist()) for a, b in zip(cuts, cuts[1:], strict=False)]


def assert_is_what_was_said(stage, responses, iterations=None):
    """Every response is its turns and the template's results after them, by a loop in Python. Returns the calls."""
    rollout, said, calls = responses.rollout, responses.conversations, stage.turns._calls
    made = 0
    for row in range(len(rollout.lengths)):
        messages, length = [], 0
        runs = parts(rollout, row)
        while runs:
            is_sampled, ids = runs.pop(0)
            assert is_sampled
            message = calls.parse(ids, "<assistant>")
            messages.append(message)
            length += len(ids)
            if not message.get("tool_calls"):
                assert not runs
                break
            results = stage.turns._toolbox.call([message["tool_calls"]])
            turns_so_far = sum(m["role"] == "assistant" for m in messages)
            if iterations is not None and turns_so_far > iterations:
                assert not runs
                break
            made += len(results.calls[0])
            suffix = calls.suffix(results.messages[0])[0]
            if length + len(suffix) > LENGTH:
                assert not runs
                break
            assert runs.pop(0) == (False, suffix)
            messages += results.messages[0]
            length += len(suffix)
            if length == LENGTH:
                assert not runs
                break
        assert said.messages[row] == messages
        assert length == int(rollout.lengths[row])
        ended = runs == [] and messages[-1]["role"] == "assistant"
        last = int(rollout.response[row, length - 1])
        assert bool(rollout.ended[row]) == (ended and last in STOPS)
    return made


def test_a_response_is_its_turns_with_the_results_of_its_calls_between_them(tokenizer):
    stage = stage_of(tokenizer)
    responses = respond(stage)
    made = assert_is_what_was_said(stage, responses)
    assert made > 8, "too few calls to say anything"
    several = sum(sum(not is_sampled for is_sampled, _ in parts(responses.rollout, row)) > 1 for row in range(BATCH))
    assert several > 0
    metrics = responses.conversations.metrics
    assert metrics["tools/call_frequency"] == made / BATCH and 0 < metrics["tools/failure_frequency"] < 1
    assert compilations(stage, ("generate",)) == {"generate": 1}
    stage.close()


def test_the_samplers_log_probabilities_are_those_of_the_whole_response_and_0_at_results(tokenizer):
    stage = stage_of(tokenizer)
    rollout = respond(stage).rollout
    network = stage.programs._with_params({"policy": stage.state.params["policy"]}, None).policy
    logprobs = response_logprobs(network, group_rollout(rollout), stage.config)[0].reshape(rollout.response.shape)
    inside = np.arange(LENGTH)[None] < np.asarray(rollout.lengths)[:, None]
    sampled = inside & np.asarray(rollout.sampled)
    np.testing.assert_allclose(np.asarray(rollout.logprobs)[sampled], np.asarray(logprobs)[sampled], atol=1e-5)
    assert not np.asarray(rollout.logprobs)[~sampled].any()
    stage.close()


@pytest.fixture(scope="module")
def whole(tokenizer):
    stage = stage_of(tokenizer)
    responses = respond(stage)
    stage.close()
    return jax.device_get(responses.rollout), responses.conversations


@pytest.mark.parametrize(
    "options",
    [
        {"decode_slots": 4},
        {"decode_slots": 6, "draft": "ngram", "decode_shrink": True},
        {"decode_shrink": True},
        {"rollout_batch_size": 4, "micro_batch_size": 4},
        {"shared_prompts": False},
        {"repetition_penalty": 1.0, "draft": "ngram"},
    ],
    ids=lambda options: ",".join(options),
)
def test_slots_drafts_chunks_and_shrinking_change_no_turn(tokenizer, whole, options):
    stage = stage_of(tokenizer, **options)
    responses = respond(stage)
    rollout, said = jax.device_get(responses.rollout), responses.conversations
    for name in ("response", "lengths", "ended", "sampled"):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(whole[0], name))
    np.testing.assert_allclose(rollout.logprobs, whole[0].logprobs, atol=2e-6)
    assert said.messages == whole[1].messages and said.metrics == whole[1].metrics
    stage.close()


def test_a_row_with_tools_is_that_row_alone(tokenizer, whole):
    stage = stage_of(tokenizer)
    for row in range(0, BATCH, 5):
        responses = respond(stage, real=row + 1)
        own = jax.device_get(responses.rollout)
        np.testing.assert_array_equal(own.response[row], whole[0].response[row])
        assert responses.conversations.messages[row] == whole[1].messages[row]
        # The rows after it call nothing.
        assert all(parts(own, i) == parts(own, i)[:1] for i in range(row + 1, BATCH))
    stage.close()


@pytest.mark.parametrize(
    "engine", [{"rollout_max_steps": 6}, {"rollout_max_steps": 16, "decode_slots": 4, "draft": "ngram"}]
)
@pytest.mark.parametrize("environment", [None, tt.Counter])
def test_responses_that_go_on_are_those_of_a_rollout_without_a_limit(tokenizer, engine, environment):
    """Their tokens, results, messages and environments; an evaluation in between leaves them alone."""
    options = {"tools": [tt.tell, tt.fail] + ([] if environment else [tt.add]), "environment_factory": environment}
    whole = stage_of(tokenizer, **options)
    wanted = respond(whole)
    counts = [each.count for each in wanted.conversations.environments or ()]
    whole.close()
    stage = stage_of(tokenizer, **options, **engine, old_logprobs="sampler")
    state, first = stage.state, np.full(BATCH, -1)
    for update in range(60):
        prompts, state, unfinished = stage._prompts_that_go_on(state)
        responses = turns.respond(
            stage.programs.sampler(
                state.params["policy"], seed=state.seed, step=state.step, rollout_state=state.rollout
            ),
            stage.programs.place,
            stage.turns,
            prompts,
            stage.train_data,
            group_size=GROUP,
            at=turns.update_label(update),
            unfinished=unfinished,
        )
        # As an update returns it.
        placed = jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), responses.rollout_state, state.rollout)
        state = state.replace(rollout=placed)
        rollout, said = jax.device_get(responses.rollout), responses.conversations
        assert said.responses == responses.present.sum() and (rollout.lengths[~responses.present] == -1).all()
        for row in np.flatnonzero(responses.present & (first < 0)):
            first[row] = update
            for name in ("response", "sampled", "lengths", "ended"):
                expected = np.asarray(getattr(wanted.rollout, name))[row]
                np.testing.assert_array_equal(getattr(rollout, name)[row], expected)
            np.testing.assert_allclose(rollout.logprobs[row], np.asarray(wanted.rollout.logprobs)[row], atol=1e-5)
            assert said.messages[row] == wanted.conversations.messages[row]
            if environment:
                assert said.environments[row].count == counts[row]
        if environment and update < 3:
            stage.samples(state)
        if (first >= 0).all():
            break
    assert (first >= 0).all() and len(set(first)) > 1
    assert compilations(stage, ("generate",)) == {"generate": 1 + bool(environment)}  # evaluations have no limit
    stage.close()


def test_a_resume_without_records_says_where_tools_return_something_else(tokenizer):
    """The turns of responses that go on are made again from the checkpoint, here the state of another stage."""
    options = {"rollout_max_steps": 6, "old_logprobs": "sampler", "learning_rate": 0.0}
    before = stage_of(tokenizer, tools=[tt.tell], **options)
    state, _, _ = before.train_step(before.state, 0)
    before.close()
    unfinished = jax.device_get(state.rollout.unfinished)
    assert (~unfinished.sampled & unfinished.held.repeat(GROUP)[:, None]).any(), "no result goes on"

    def tell(word: str) -> str:
        """Says another word.

        Args:
            word: The word.
        """
        return f"{word} y"

    after = stage_of(tokenizer, tools=[tell], **options)
    with pytest.raises(UserError, match=r"update 1, row \d+, turn 1: tools return other results than the response"):
        after.train_step(state, 1)
    after.close()


@pytest.mark.parametrize("limit", [1, 2])
def test_at_the_limit_a_call_is_left_unanswered(tokenizer, limit):
    stage = stage_of(tokenizer, max_tool_calling_iterations=limit)
    responses = respond(stage)
    assert_is_what_was_said(stage, responses, limit)
    results = [sum(not is_sampled for is_sampled, _ in parts(responses.rollout, row)) for row in range(BATCH)]
    assert max(results) == limit
    last = [messages[-1] for messages in responses.conversations.messages]
    assert any(message.get("tool_calls") for message in last)
    stage.close()


@pytest.mark.parametrize("config", [GRPOConfig, PPOConfig])
def test_updates_learn_from_sampled_tokens_and_evaluations_call_tools(tokenizer, config):
    stage = stage_of(tokenizer, config, eval_dataset=tt.prompts(5), learning_rate=1e-3, log_completions=True)
    state, metrics, seconds = stage.train_step(stage.state, 0)
    metrics = {name: float(x) for name, x in sharding.fetch(metrics).items()}
    assert metrics["tools/call_frequency"] > 0 and seconds["tools"] >= 0
    rollout = stage._recent_batches[1][0].rollout
    counted = (np.arange(LENGTH)[None] < np.asarray(rollout.lengths)[:, None]) & np.asarray(rollout.sampled)
    assert metrics["completions/mean_length"] == pytest.approx(counted.sum(1).mean())
    assert abs(metrics["val/first_ratio_error"]) < 1e-4 and np.isfinite(metrics["grad_norm"])
    state, _, _ = stage.train_step(state, 1)
    assert compilations(stage) == {"generate": 1, "experience": 1, "update": 1}
    evaluated = stage.evaluate(state)
    assert evaluated["eval_tools/call_frequency"] > 0
    rows, _ = stage.samples(state)
    assert [row["query"].split("<user>")[1] for row in rows] == [
        f"{row['prompt'][0]['content']}<|endoftext|><assistant>" for row in tt.prompts(5)
    ]
    table, _ = stage.training_completions()
    assert len(table) == BATCH
    stage.close()


def test_prompts_of_files_and_of_objects_show_the_tools(tokenizer, tmp_path):
    tt.save(tmp_path, rows=16)
    files = {"dataset_name": f"{tmp_path}/prompts.jsonl", "eval_dataset_name": f"{tmp_path}/prompts.jsonl"}
    config = GRPOConfig(**{**OPTIONS, "tokenizer_name_or_path": tokenizer, **files})
    stage = stages.open_stage(config, reward_funcs=[told], tools=tt.TOOLS)
    for source in (stage.train_data, *stage.eval_sets.values()):
        assert all(text.startswith("<tools>add tell fail ") for text in source.display_texts(range(len(source))))
    stage.close()
    mixture = [{"path": files["dataset_name"]}, {"path": files["dataset_name"], "chat_template_kwargs": {"x": 1}}]
    stage = stages.open_stage(
        GRPOConfig(**{**OPTIONS, "tokenizer_name_or_path": tokenizer, "datasets": mixture, "eval_dataset_name": None}),
        reward_funcs=[told],
        tools=tt.TOOLS,
    )
    assert all(text.startswith("<tools>add tell fail ") for text in stage.train_data.display_texts(range(32)))
    stage.close()


# --- environments


class Teller:
    def reset(self, prompt, answer):
        self.word = answer
        return [{"type": "text", "text": " z"}]

    def tell(self, word: str) -> str:
        """Says a word.

        Args:
            word: The word.
        """
        return self.word[-1]

    async def get_reward(self):
        return -1.0


def test_an_environment_is_reset_for_each_response_and_gives_tools_and_reward(tokenizer):
    stage = stage_of(tokenizer, tools=[tt.tell], environment_factory=tt.Counter, learning_rate=1e-3)
    assert stage.scorer.names == ("told", "Counter")
    responses = respond(stage)
    said, rollout = responses.conversations, responses.rollout
    assert len({id(each) for each in said.environments}) == BATCH
    hf, lengths = stage.tokenizer.hf, np.asarray(rollout.prompt_lengths)
    for row in range(BATCH):
        answer = responses.source.raw[row]["answer"]
        text = f" {int(answer) % 10}" if int(answer) % 3 else ""
        assert responses.source.texts([row])[0][-1]["content"].endswith(text)
        ids = np.asarray(rollout.prompt_tokens[row])[-lengths[row] :]
        template = {"tools": [{"function": {"name": name}} for name in ("tell", "add")]}
        rendered = hf.apply_chat_template(
            responses.source.texts([row])[0], add_generation_prompt=True, tokenize=False, **template
        )
        assert ids.tolist() == hf(rendered, add_special_tokens=False)["input_ids"]
        assert said.environments[row].answer == answer
        added = [m["content"] for m in said.messages[row] if m["role"] == "tool" and m["name"] == "add"]
        counted = [text for text in added if "error" not in text]
        assert counted == [str(n + 1) for n in range(len(counted))]
    assert any(each.count for each in said.environments)
    rows, _ = stage.samples(stage.state)
    ends = [row["query"].removesuffix("<|endoftext|><assistant>")[-2:] for row in rows]
    assert [end for i, end in enumerate(ends) if i % 3] == [f" {i % 10}" for i in range(len(ends)) if i % 3]
    state, _, _ = stage.train_step(stage.state, 0)
    batch = stage._recent_batches[1][0]
    counts = [float(each.count) for each in said.environments]  # of the same instances
    np.testing.assert_array_equal(np.asarray(batch.scored.each_reward)[:, 1], counts)
    stage.train_step(state, 1)
    assert max(each.resets for each in said.environments) == 4, "instances are used again"
    assert compilations(stage) == {"generate": 1, "experience": 1, "update": 1}
    stage.close()


def test_rows_choose_among_several_environments(tokenizer):
    rows = [{**row, "environment": ("count", "say")[i % 2]} for i, row in enumerate(tt.prompts(16))]
    factories = {"count": tt.Counter, "say": Teller}
    stage = stage_of(tokenizer, tools=[], environment_factory=factories, train_dataset=rows)
    responses = respond(stage)
    for row in range(BATCH):
        name = responses.source.raw[row]["environment"]
        assert type(responses.conversations.environments[row]) is factories[name]
        tools = responses.source.display_texts([row])[0].split("<user>")[0]
        assert tools == {"count": "<tools>add ", "say": "<tools>tell "}[name]
        for message in responses.conversations.messages[row]:
            if message["role"] == "tool" and message["name"] == {"count": "tell", "say": "add"}[name]:
                assert "not found" in message["content"]
    scored = stage.train_step(stage.state, 0) and stage._recent_batches[1][0].scored
    each = np.asarray(scored.each_reward)
    count = np.array([row["environment"] == "count" for row in stage._recent_batches[1][0].source.raw])
    assert stage.scorer.names == ("told", "Counter", "Teller")
    assert np.isnan(each[~count, 1]).all() and (each[~count, 2] == -1).all() and np.isnan(each[count, 2]).all()
    stage.close()


class Owner(tt.Counter):
    def reset(self, answer, **row):
        assert row == {}
        self.count, self.answer = 0, answer
        return f"x {answer}"


@pytest.mark.parametrize("rows", [16, 5])
def test_an_environment_may_own_the_prompts(tokenizer, rows):
    data = [{"answer": row["answer"]} for row in tt.prompts(rows)]
    stage = stage_of(tokenizer, tools=[], environment_factory=Owner, train_dataset=data * (16 // rows))
    responses = respond(stage)
    for row in range(BATCH):
        answer = responses.source.raw[row]["answer"]
        assert responses.source.texts([row])[0] == [{"role": "user", "content": f"x {answer}"}]
        assert responses.source.display_texts([row])[0] == f"<tools>add <user>x {answer}<|endoftext|><assistant>"
    stage.close()
    with pytest.raises(UserError, match="has no column 'prompt'"):
        stage_of(tokenizer, train_dataset=data)


class NoReset:
    pass


class BadReset(tt.Counter):
    def reset(self, **row):
        raise RuntimeError("no game today")


class LongReset(tt.Counter):
    def reset(self, **row):
        return " x" * 40


class OddReset(tt.Counter):
    def reset(self, **row):
        return 7


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (BadReset, "environment BadReset: reset raised RuntimeError: no game today"),
        (LongReset, r"row \d+: with the text of its reset the prompt has \d+ tokens, but query_length is 32"),
        (OddReset, "environment OddReset: reset returned 7; it returns text"),
    ],
)
def test_a_reset_that_fails_ends_the_run_with_its_line(tokenizer, environment, message):
    stage = stage_of(tokenizer, environment_factory=environment, tools=[])
    with pytest.raises(UserError, match=message):
        stage.train_step(stage.state, 0)
    stage.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"environment_factory": NoReset}, "environment NoReset has no method reset"),
        ({"environment_factory": 7}, "is no function or class: 7"),
        ({"environment_factory": {"count": tt.Counter}, "tools": []}, r"row 0: 'environment' is None; .* has 'count'"),
        ({"environment_factory": tt.Counter}, "tool 'add' has the name of an environment's method"),
        ({"structured_outputs_regex": "x+"}, "structured_outputs_regex with tools is not supported"),
        ({"stop_token": None, "stop_token_ids": None}, "tools need a token that ends the policy's messages"),
        ({"train_dataset": [{"prompt": "x y"}] * 16}, "tools need conversations as prompts.*are texts"),
        (
            {"train_dataset": [{**row, "tools": "[]"} for row in tt.prompts(16)]},
            "has a column 'tools' beside the option",
        ),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs has 'tools'"),
        (
            {"chat_template_kwargs": {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}},
            "does not show tool 'add' to the policy. Give another chat template",
        ),
    ],
)
def test_what_does_not_go_with_tools_is_refused_at_the_start(tokenizer, options, message):
    with pytest.raises(UserError, match=message):
        stage_of(tokenizer, **options)
