"""Where a reward model reads its score: transformers' rightmost token that is not pad, in every form of its input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import data
from rlhf_jax.algorithms import reward_model
from rlhf_jax.models.io import hf
from rlhf_jax.types import Rollout
from tests.helpers.chat_tokenizer import assistant, bytes_tokenizer, user
from tests.helpers.models_common import padded_rows, reference, reference_inputs
from tests.helpers.optional import optional

torch = optional("torch")

ENDS_WITH_EOS = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
EOS = 7


def ours(theirs, folder):
    theirs.save_pretrained(folder)
    return hf.load(str(folder), kind="scalar")


def scores_of(theirs, **inputs):
    with torch.no_grad():
        return theirs(**inputs).logits[:, 0].numpy()


def test_texts_and_rollouts_are_scored_where_transformers_pools(tmp_path):
    theirs = reference("scalar")
    model, params = ours(theirs, tmp_path)
    texts, mask = padded_rows([9, 1, 6], [0, 0, 0], 9)
    texts[0, 8] = texts[2, 5] = EOS
    expected = scores_of(theirs, **reference_inputs(texts, mask))
    found = reward_model.score_texts(model, params, texts, mask.sum(1, dtype=np.int32), dtype=jnp.float32)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)

    prompts, prompt_mask = padded_rows([5, 5, 3, 3], [0, 0, 2, 2], 5, seed=1)
    prompts[1::2] = prompts[::2]
    response, response_mask = padded_rows([4, 2, 0, 1], [0] * 4, 4, seed=2)
    response[1, 1] = EOS
    both = np.concatenate([prompt_mask, response_mask], axis=1)
    expected = scores_of(theirs, **reference_inputs(np.concatenate([prompts, response], axis=1), both))
    rollout = Rollout(
        **{
            **dict.fromkeys(Rollout.__dataclass_fields__),
            "prompt_tokens": jnp.asarray(prompts),
            "prompt_lengths": jnp.asarray(prompt_mask.sum(1, dtype=np.int32)),
            "response": jnp.asarray(np.where(response_mask, response, EOS)),
            "lengths": jnp.asarray(response_mask.sum(1, dtype=np.int32)),
            "ended": jnp.asarray([False, True, False, False]),
        }
    )
    for group in (1, 2):
        found = reward_model.score_rollout(model, params, rollout, dtype=jnp.float32, group_size=group)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pads_with_eos", [True, False])
def test_conversations_are_scored_where_transformers_pools_whether_or_not_pad_is_eos(tmp_path, pads_with_eos):
    tokenizer = bytes_tokenizer(ENDS_WITH_EOS)
    if pads_with_eos:
        tokenizer.hf.pad_token = tokenizer.hf.eos_token
    theirs = reference("scalar", vocab_size=260, pad_token_id=tokenizer.hf.pad_token_id)
    model, params = ours(theirs, tmp_path)
    tokenizer.hf.save_pretrained(tmp_path)
    own = data.load_tokenizer(str(tmp_path), vocab_size=260)
    assert (own.pad_id == own.eos_id) == pads_with_eos
    prompts, completions = [[user("i met")], [user("a")]], [[assistant("anna")], [assistant("b c")]]
    texts = [
        tokenizer.hf.apply_chat_template([*p, *c], tokenize=False) for p, c in zip(prompts, completions, strict=True)
    ]
    batch = tokenizer.hf(texts, add_special_tokens=False, padding=True, padding_side="right", return_tensors="pt")
    expected = scores_of(theirs, input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    tokens, lengths = data.reward_tokens(own, prompts, completions, [True, True], text_eos=True, max_length=64)
    found = jax.jit(lambda *args: reward_model.score_texts(model, *args, dtype=jnp.float32))(params, tokens, lengths)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
