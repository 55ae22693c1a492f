"""config.json as it is published: which keys decide what is computed, and which do not."""

import copy
import dataclasses
import json
import math
import warnings

import pytest

from rlhf_jax.errors import UserError
from rlhf_jax.models import Model
from rlhf_jax.models.families.hf_config import warn_once
from tests.helpers.optional import optional

transformers = optional("transformers")


def config(model_type, architecture, *sizes, **keys):
    """A config.json; sizes: layers, width, heads, heads of keys, units, vocabulary."""
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    hf = {"model_type": model_type, "architectures": [architecture], "torch_dtype": "bfloat16", "use_cache": True}
    hf |= {
        "initializer_range": 0.02,
        "transformers_version": "4.40.0",
        **dict(zip((*names, "vocab_size"), sizes, strict=True)),
    }
    return hf | keys


def llama(*sizes, **keys):
    keys = {"hidden_act": "silu", "attention_bias": False, "pretraining_tp": 1, "rope_scaling": None, **keys}
    return config("llama", "LlamaForCausalLM", *sizes, rms_norm_eps=1e-5, **keys)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
LLAMA3 |= {"original_max_position_embeddings": 8192}
LLAMA32 = {"rope_theta": 500000.0, "max_position_embeddings": 131072, "rope_scaling": {**LLAMA3, "factor": 32.0}}
LLAMA32 |= {"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "mlp_bias": False}
SMOLLM2 = {
    "rope_theta": 100000,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_interleaved": False,
}
SMOLLM2 |= {"is_llama_config": True, "tie_word_embeddings": True, "pad_token_id": 2, "initializer_range": 0.0417}
QWEN = {"hidden_act": "silu", "attention_dropout": 0.0, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0}
QWEN |= {"use_sliding_window": False, "sliding_window": 32768, "bos_token_id": 151643, "eos_token_id": 151645}
QWEN3 = {**QWEN, "sliding_window": None, "rope_scaling": None, "head_dim": 128, "attention_bias": False}
QWEN3 |= {"max_position_embeddings": 40960}
MISTRAL = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MISTRAL |= {"max_position_embeddings": 32768}
GEMMA = {
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
}
GEMMA |= {"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
GEMMA2 = {**GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256}
GEMMA2 |= {"cache_implementation": "hybrid", "rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_size": 4096}
GEMMA2 |= {"max_position_embeddings": 8192}
GEMMA3 = {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None, "query_pre_attn_scalar": 256}
GEMMA3 |= {"cache_implementation": "hybrid", "rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": None}
GEMMA3 |= {"sliding_window": 512, "sliding_window_pattern": 6, "max_position_embeddings": 32768}
PHI3 = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "rope_scaling": None}
PHI3 |= {"attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": False, "bos_token_id": 1}
PHI3 |= {"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "original_max_position_embeddings": 4096}
GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_ctx": 1024, "n_embd": 768, "n_head": 12}
GPT2 |= {"n_positions": 1024, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "initializer_range": 0.02}
GPT2 |= {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1, "vocab_size": 50257, "bos_token_id": 50256}
GPT2 |= {"summary_type": "cls_index", "summary_use_proj": True, "summary_first_dropout": 0.1, "eos_token_id": 50256}
GPT2 |= {"summary_activation": None, "summary_proj_to_labels": True, "task_specific_params": {"text-generation": {}}}
OLMO2 = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_theta": 500000,
    "rope_scaling": None,
}
OLMO2 |= {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "pad_token_id": 100277, "eos_token_id": 100257}
OLMO2 |= {"max_position_embeddings": 4096}
SMOLLM3 = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "no_rope_layer_interval": 4,
    "rope_theta": 5e6,
}
SMOLLM3 |= {"no_rope_layers": [1, 1, 1, 0] * 9, "layer_types": ["full_attention"] * 36, "use_sliding_window": False}
SMOLLM3 |= {
    "sliding_window": None,
    "rope_scaling": None,
    "rms_norm_eps": 1e-6,
    "pretraining_tp": 2,
    "max_window_layers": 28,
}
SMOLLM3 |= {"max_position_embeddings": 65536, "bos_token_id": 128000, "eos_token_id": 128012, "pad_token_id": 128004}
PYTHIA = {"hidden_act": "gelu", "rotary_pct": 0.25, "rotary_emb_base": 10000, "max_position_embeddings": 2048}
PYTHIA |= {"layer_norm_eps": 1e-5, "use_parallel_residual": True, "tie_word_embeddings": False, "bos_token_id": 0}
VISION = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "image_size": 512, "patch_size": 16}
VISION |= {"model_type": "smolvlm_vision", "max_image_size": {"longest_edge": 512}, "size": {"longest_edge": 2048}}
VISION |= {"tie_word_embeddings": False, "use_base_siglip": False, "num_hidden_layers": 12}
SMOLVLM = {
    "_flash_attn_2_enabled": True,
    "_name_or_path": "None",
    "neftune_noise_alpha": 0.0,
    "pixel_shuffle_factor": 4,
}
SMOLVLM |= {"perceiver_config": {"model_type": "vllama3"}, "qk_layer_norms": False, "use_resampler": False}
SMOLVLM |= {"vocab_size": 49280, "rope_theta": 100000, "max_position_embeddings": 8192, "is_llama_config": True}
SMOLVLM |= {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "head_dim": 64,
}
SMOLVLM |= {"num_key_value_heads": 3, "intermediate_size": 1536, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}

# Name: config.json, parameters of the text model, theta (of the last rotary embedding), the keys that one line
# names. From memory of the files; a parameter count that is right says that the sizes are.
PUBLISHED = {
    "Llama-2-7b": (llama(32, 4096, 32, 32, 11008, 32000, max_position_embeddings=4096), 6_738_415_616, 1e4, ""),
    "vicuna-7b": (
        llama(32, 4096, 32, 32, 11008, 32000, _name_or_path="vicuna", max_sequence_length=2048, pad_token_id=0),
        *(6_738_415_616, 1e4, "max_sequence_length"),
    ),
    "Llama-3-8B": (llama(32, 4096, 32, 8, 14336, 128256, rope_theta=5e5), 8_030_261_248, 5e5, ""),
    "Llama-3.1-8B": (
        llama(32, 4096, 32, 8, 14336, 128256, rope_theta=5e5, rope_scaling=LLAMA3, mlp_bias=False),
        *(8_030_261_248, 5e5, ""),
    ),
    "Llama-3.2-1B": (llama(16, 2048, 32, 8, 8192, 128256, tie_word_embeddings=True, **LLAMA32), 1_235_814_400, 5e5, ""),
    "unsloth/Llama-3.2-1B": (
        llama(
            16, 2048, 32, 8, 8192, 128256, tie_word_embeddings=True, unsloth_fixed=True, pad_token_id=128004, **LLAMA32
        ),
        *(1_235_814_400, 5e5, "unsloth_fixed"),
    ),
    "SmolLM2-135M": (llama(30, 576, 9, 3, 1536, 49152, **SMOLLM2), 134_515_008, 1e5, "is_llama_config"),
    "SmolLM2-135M-Instruct": (
        {
            **llama(30, 576, 9, 3, 1536, 49152, **SMOLLM2),
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        },
        *(134_515_008, 1e5, "is_llama_config, transformers.js_config"),
    ),
    "SmolLM2 before its release": (
        llama(30, 576, 9, 3, 1536, 49152, **SMOLLM2, _model_name_or_path="Smollm2 135M", unk_token_id=0),
        *(134_515_008, 1e5, "is_llama_config"),
    ),
    "TinyLlama-1.1B": (llama(22, 2048, 32, 4, 5632, 32000, max_position_embeddings=2048), 1_100_048_384, 1e4, ""),
    "Mistral-7B-v0.1": (
        config(
            "mistral",
            "MistralForCausalLM",
            32,
            4096,
            32,
            8,
            14336,
            32000,
            sliding_window=4096,
            rope_theta=1e4,
            **MISTRAL,
        ),
        *(7_241_732_096, 1e4, ""),
    ),
    "Mistral-7B-Instruct-v0.3": (
        config(
            "mistral",
            "MistralForCausalLM",
            32,
            4096,
            32,
            8,
            14336,
            32768,
            sliding_window=None,
            rope_theta=1e6,
            **MISTRAL,
        ),
        *(7_248_023_552, 1e6, ""),
    ),
    "Mistral-Nemo": (
        config("mistral", "MistralForCausalLM", 40, 5120, 32, 8, 14336, 131072, rope_theta=1e6)
        | {**MISTRAL, "sliding_window": None, "head_dim": 128},
        *(12_247_782_400, 1e6, ""),
    ),
    "Qwen2.5-0.5B": (
        config(
            "qwen2", "Qwen2ForCausalLM", 24, 896, 14, 2, 4864, 151936, tie_word_embeddings=True, max_window_layers=21
        )
        | QWEN,
        *(494_032_768, 1e6, ""),
    ),
    "Qwen2.5-Math-7B": (
        config(
            "qwen2", "Qwen2ForCausalLM", 28, 3584, 28, 4, 18944, 152064, tie_word_embeddings=False, max_window_layers=28
        )
        | {**QWEN, "rope_theta": 10000, "use_mrope": False},
        *(7_615_616_512, 1e4, ""),
    ),
    "R1-Distill-Qwen-1.5B": (
        config(
            "qwen2", "Qwen2ForCausalLM", 28, 1536, 12, 2, 8960, 151936, tie_word_embeddings=False, max_window_layers=21
        )
        | {**QWEN, "rope_theta": 10000, "use_mrope": False},
        *(1_777_088_000, 1e4, ""),
    ),
    "Qwen3-0.6B": (
        config(
            "qwen3", "Qwen3ForCausalLM", 28, 1024, 16, 8, 3072, 151936, tie_word_embeddings=True, max_window_layers=28
        )
        | QWEN3,
        *(596_049_920, 1e6, ""),
    ),
    "Skywork-Reward-V2-Qwen3-0.6B": (
        config("qwen3", "Qwen3ForSequenceClassification", 28, 1024, 16, 8, 3072, 151936, tie_word_embeddings=True)
        | {**QWEN3, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "layer_types": ["full_attention"] * 28},
        *(596_049_920, 1e6, ""),
    ),
    "SmolLM3-3B": (
        config("smollm3", "SmolLM3ForCausalLM", 36, 2048, 16, 4, 11008, 128256) | SMOLLM3,
        3_075_098_624,
        5e6,
        "max_window_layers",
    ),
    "OLMo-2-1B": (config("olmo2", "Olmo2ForCausalLM", 16, 2048, 16, 16, 8192, 100352) | OLMO2, 1_484_916_736, 5e5, ""),
    "gemma-2-2b": (
        config("gemma2", "Gemma2ForCausalLM", 26, 2304, 8, 4, 9216, 256000) | GEMMA2,
        *(2_614_341_888, 1e4, "sliding_window_size"),
    ),
    "gemma-2-27b": (
        config("gemma2", "Gemma2ForCausalLM", 46, 4608, 32, 16, 36864, 256000)
        | {**GEMMA2, "head_dim": 128, "query_pre_attn_scalar": 144, "_attn_implementation": "eager"},
        *(27_227_128_320, 1e4, "sliding_window_size"),
    ),
    "gemma-3-1b": (
        config("gemma3_text", "Gemma3ForCausalLM", 26, 1152, 4, 1, 6912, 262144) | GEMMA3,
        999_885_952,
        1e6,
        "",
    ),
    "gemma-3-270m": (
        config("gemma3_text", "Gemma3ForCausalLM", 18, 640, 4, 1, 2048, 262144)
        | {key: value for key, value in GEMMA3.items() if key != "sliding_window_pattern"}
        | {"_sliding_window_pattern": 6, "use_bidirectional_attention": False, "dtype": "bfloat16"}
        | {"layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3},
        *(268_098_176, 1e6, ""),
    ),
    "gemma-3-4b": (
        {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "mm_tokens_per_image": 256}
        | {"boi_token_index": 255999, "eos_token_id": [1, 106], "vision_config": {"model_type": "siglip_vision_model"}}
        | {
            "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text"}
            | {"num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
        },
        *(3_880_263_168, 1e6, ""),
    ),
    "Phi-3-mini-4k": (
        config("phi3", "Phi3ForCausalLM", 32, 3072, 32, 32, 8192, 32064, sliding_window=2047, rope_theta=1e4) | PHI3,
        *(3_821_079_552, 1e4, ""),
    ),
    "phi-4": (
        config("phi3", "Phi3ForCausalLM", 40, 5120, 40, 10, 17920, 100352, sliding_window=None, rope_theta=250000)
        | {**PHI3, "max_position_embeddings": 16384, "pad_token_id": 100349},
        *(14_659_507_200, 250_000, ""),
    ),
    "gpt2": ({**GPT2, "n_layer": 12}, 124_439_808, None, ""),
    "distilgpt2": (
        {**GPT2, "n_layer": 6, "_num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}},
        *(81_912_576, None, ""),
    ),
    "pythia-160m": (
        config("gpt_neox", "GPTNeoXForCausalLM", 12, 768, 12, 12, 3072, 50304) | PYTHIA,
        162_322_944,
        1e4,
        "",
    ),
    "SmolVLM-256M": (
        {"model_type": "smolvlm", "architectures": ["SmolVLMForConditionalGeneration"], "image_token_id": 49190}
        | {"scale_factor": 4, "tie_word_embeddings": False, "vision_config": VISION, "text_config": SMOLVLM},
        *(162_974_016, 1e5, "is_llama_config, neftune_noise_alpha, perceiver_config, pixel_shuffle_factor"),
    ),
}


def opened(hf, **options):
    """(the model, its lines)."""
    warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = Model.from_hf_config(copy.deepcopy(hf), "some/config.json", **options)
    return model, [str(warning.message) for warning in caught]


def decoder(model):
    return dataclasses.replace(model.family.decoder_config(model.config), source="")


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_opens_with_its_values_and_one_line_names_what_changes_nothing(name):
    hf, parameters, theta, ignored = PUBLISHED[name]
    model, lines = opened(hf)
    config = decoder(model)
    count = sum(math.prod(tensor.shape) for tensor in model.family.tensors(model.config))
    count += 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    assert count == parameters
    assert config.ropes[-1].theta == theta if theta else not config.ropes
    assert [line.partition(" has no ")[2] for line in lines] == ([f"{ignored}: ignored"] if ignored else [])
    assert all(line.startswith("some/config.json") for line in lines)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_as_transformers_reads_it(name):
    hf = PUBLISHED[name][0]
    ours, _ = opened(hf)
    theirs = transformers.AutoConfig.for_model(**copy.deepcopy(hf))
    assert decoder(opened({**theirs.to_dict(), "architectures": None})[0]) == decoder(ours)


@pytest.mark.parametrize("name", [name for name, (hf, *_) in PUBLISHED.items() if "text_config" not in hf])
def test_the_exported_config_opens_again_here_and_in_transformers(name):
    model, _ = opened(PUBLISHED[name][0])
    exported = json.loads(json.dumps(model.to_hf_config()))
    assert decoder(opened(exported)[0]) == decoder(model)
    theirs = transformers.AutoConfig.for_model(**exported)
    assert decoder(opened({**theirs.to_dict(), "architectures": None})[0]) == decoder(model)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("Llama-3-8B", {"is_causal": False}),
        ("Llama-3-8B", {"is_causal": None}),
        ("Llama-3-8B", {"sliding_window": 4096}),
        ("Llama-3-8B", {"layer_types": ["sliding_attention"] * 32}),
        ("Llama-3-8B", {"attention_chunk_size": 8192}),
        ("Llama-3-8B", {"rope_interleaved": True}),
        ("Llama-3-8B", {"is_encoder_decoder": True}),
        ("Llama-3-8B", {"kv_sharing_modes": ["shared"] * 32}),
        ("Llama-3-8B", {"per_layer_config": {"0": {"hidden_act": "relu"}}}),
        ("Llama-3-8B", {"transformers_weights": "other.safetensors"}),
        ("OLMo-2-1B", {"sliding_window": 4096}),
        ("gpt2", {"partial_rotary_factor": 0.5}),
        ("gpt2", {"hidden_size": 1024}),
        ("gpt2", {"add_cross_attention": True}),
        ("pythia-160m", {"is_causal": False}),
        ("pythia-160m", {"sliding_window": 512}),
        ("pythia-160m", {"head_dim": 32}),
    ],
)
def test_a_key_that_transformers_computes_with_is_refused_by_name_and_value(name, keys):
    (key, value), hf = *keys.items(), PUBLISHED[name][0]
    with pytest.raises(UserError, match=rf"^some/config.json: {key} is ") as error:
        Model.from_hf_config(hf | keys, "some/config.json")
    assert repr(value) in str(error.value)


def test_a_key_that_a_later_class_declares_is_refused_unless_at_its_default(monkeypatch):
    hf = PUBLISHED["Llama-3-8B"][0]
    monkeypatch.setattr(
        "rlhf_jax.models.families.hf_config.declared_keys", lambda model_type: {"new_attention": "plain"}
    )
    assert opened({**hf, "new_attention": "plain"})[1] == []
    with pytest.raises(UserError, match="new_attention is 'square'"):
        opened({**hf, "new_attention": "square"})
    monkeypatch.setattr("rlhf_jax.models.families.hf_config.declared_keys", lambda model_type: None)
    with pytest.raises(UserError, match="new_attention is 'square'"):
        opened({**hf, "new_attention": "square"})


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("Llama-3-8B", {"is_causal": True, "is_decoder": True, "sliding_window": None, "per_layer_config": {}}),
        ("Llama-3-8B", {"is_encoder_decoder": False, "chunk_size_feed_forward": 0, "_anything": 3}),
        ("gpt2", {"hidden_size": 768, "num_hidden_layers": 12, "head_dim": 64, "max_position_embeddings": 1024}),
        ("pythia-160m", {"head_dim": 64, "classifier_dropout": 0.1, "num_key_value_heads": 12}),
    ],
)
def test_a_key_without_effect_passes_without_a_line(name, keys):
    hf = PUBLISHED[name][0]
    model, lines = opened(hf | keys)
    assert lines == [] and decoder(model) == decoder(opened(hf)[0])


def test_the_line_comes_once_for_a_model_that_is_opened_several_times():
    hf = PUBLISHED["vicuna-7b"][0]
    assert len(opened(hf)[1]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Model.from_hf_config(hf, "some/config.json")


def test_a_vision_config_as_published_opens():
    model, lines = opened(PUBLISHED["SmolVLM-256M"][0], images=True)
    assert model.config.vision.tower.num_hidden_layers == 12
    assert [line.partition(" has no ")[2] for line in lines][1:] == ["max_image_size, size: ignored"]
