"""The keys that transformers' config classes declare, and those that its generic code reads from any config."""

import ast
import dataclasses
import importlib.util
import pathlib
import subprocess
import sys

import pytest

from rlhf_jax.models import FAMILIES, Model, custom_shape
from rlhf_jax.models.families import gpt_neox, hf_config
from rlhf_jax.models.families.declared_keys import NO_DEFAULT, declared_keys
from tests.helpers.optional import optional

transformers = optional("transformers")
ROOT = pathlib.Path(importlib.util.find_spec("transformers").origin).parent
VISION = ("smolvlm_vision", "idefics3_vision")
GENERIC = (
    *("masking_utils", "cache_utils", "modeling_rope_utils", "modeling_utils", "modeling_layers", "activations"),
    *("configuration_utils", "modeling_flash_attention_utils", "generation/utils", "generation/candidate_generator"),
    *("integrations/sdpa_attention", "integrations/flash_attention", "integrations/flex_attention"),
    *("integrations/eager_paged", "integrations/sdpa_paged", "integrations/flash_paged", "utils/generic"),
    *("integrations/heterogeneity/configuration_utils", "utils/output_capturing", "loss/loss_utils"),
)
# Names that this code reads from a config and that do not change what a decoder of our families computes.
JUDGED_HARMLESS = {
    "read by every family": "attention_dropout initializer_range max_position_embeddings num_hidden_layers "
    "num_key_value_heads rope_parameters rope_scaling rope_theta tie_word_embeddings vocab_size",
    "initialisation and training speed": "gradient_checkpointing init_std initializer_factor distributed_config "
    "fusion_config",
    "heads of multi-token prediction, which are drafts": "chain_hidden_post_norm first_k_dense_replace "
    "logits_mup_width_multiplier mlp_layer_types mtp_hidden_states_first mtp_layer_types mtp_mlp_layer_types "
    "mtp_per_layer_config num_mtp_layers unpadded_vocab_size",
    "heads of other tasks": "hidden_dropout token_classification_bias summary_last_dropout",
    "which outputs are returned": "tie_last_hidden_states",
    "checks of the config alone": "embed_dim num_heads quantization_config",
    "the size of a static cache": "qk_head_dim",
    "convolutions": "number_of_conv_states",
    "how a file is fetched and which kernel runs": "attn_implementation cache_dir commit_message "
    "experts_implementation force_download gguf_file local_files_only name_or_path proxies repo_id "
    "return_unused_kwargs revision subfolder token trust_remote_code",
    "methods and the config of generation": "validate compile_config",
}


def config_class(model_type):
    return transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]


@pytest.mark.parametrize("model_type", [*FAMILIES, *VISION])
def test_declared_keys_are_the_fields_of_the_class_with_their_defaults(model_type):
    declared, fields = declared_keys(model_type), dataclasses.fields(config_class(model_type))
    assert {field.name for field in fields} | set(config_class(model_type).attribute_map) <= declared.keys()
    known = {field.name: field.default for field in fields if declared[field.name] is not NO_DEFAULT}
    assert known == {name: declared[name] for name in known} and len(known) > 10


def test_keys_of_a_plain_class_are_its_arguments(tmp_path, monkeypatch):
    source = "class LlamaConfig:\n    model_type = 'llama'\n    def __init__(self, a, b=3, *, c=f(), **kwargs):\n"
    source += "        kwargs.pop('d', None)\n"
    (tmp_path / "models" / "llama").mkdir(parents=True)
    (tmp_path / "models" / "llama" / "configuration_llama.py").write_text(source)
    spec = importlib.util.spec_from_file_location("transformers", tmp_path / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    declared_keys.cache_clear()
    try:
        assert declared_keys("llama") == {"a": NO_DEFAULT, "b": 3, "c": NO_DEFAULT, "d": NO_DEFAULT}
        assert declared_keys("mistral") is None
    finally:
        declared_keys.cache_clear()


def test_neither_torch_nor_transformers_is_imported_for_the_question():
    code = (
        "import sys; from rlhf_jax.models.families.declared_keys import declared_keys as keys; assert keys('llama'); "
    )
    code += "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("model_type", list(FAMILIES))
def test_every_declared_key_is_read_or_judged_harmless(model_type, monkeypatch):
    seen = []
    for module in (hf_config, gpt_neox):
        monkeypatch.setattr(module, "judge_others", lambda others, *_: seen.append(set(others)))
    hf = custom_shape(f"{model_type}:2x32x2", 50).to_hf_config()
    defaults = {key: default for key, default in declared_keys(model_type).items() if default is not NO_DEFAULT}
    Model.from_hf_config({**defaults, **hf})
    assert len(seen[-1]) > 5 and seen[-1] <= hf_config.HARMLESS | hf_config.READ_FROM_ANY_CONFIG


def names_read_from_configs(path: pathlib.Path) -> set[str]:
    """Names of getattr and hasattr on a config, and of what a config class pops from its arguments."""
    names, of_configs = set(), path.name in ("configuration_utils.py", "modeling_rope_utils.py")
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        function, key = ast.unparse(node.func), node.args[-1]
        if function in ("getattr", "hasattr"):
            source, key = ast.unparse(node.args[0]), node.args[1]
            if "config" not in source and not (of_configs and source == "self"):
                continue
        elif function in ("kwargs.pop", "kwargs.get") and of_configs:
            key = node.args[0]
        elif "attr_without_heterogeneous_validation" in function:
            key = node.args[0]
        else:
            continue
        if isinstance(key, ast.Constant) and not key.value.startswith("_"):
            names.add(key.value)
    return names


@pytest.mark.parametrize("file", [*GENERIC, *FAMILIES])
def test_every_name_that_transformers_reads_from_any_config_is_refused_or_judged_harmless(file):
    folder = file.removesuffix("_text")
    path = ROOT / (f"models/{folder}/modeling_{folder}.py" if file in FAMILIES else f"{file}.py")
    declared = declared_keys(file).keys() if file in FAMILIES else set()
    judged = {*hf_config.HARMLESS, *hf_config.READ_FROM_ANY_CONFIG, *declared}
    judged |= {name for names in JUDGED_HARMLESS.values() for name in names.split()}
    assert names_read_from_configs(path) <= judged


def test_no_name_is_judged_that_transformers_no_longer_reads():
    models = [ROOT / f"models/{name}/modeling_{name}.py" for name in (key.removesuffix("_text") for key in FAMILIES)]
    read = set().union(*map(names_read_from_configs, (*(ROOT / f"{file}.py" for file in GENERIC), *models)))
    judged = {name for names in JUDGED_HARMLESS.values() for name in names.split()}
    assert judged <= read
