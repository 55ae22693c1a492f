"""Adapters: the numbers, gradients and files of Hugging Face's PEFT, and what a frozen base means."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_jax.errors import UserError
from rlhf_jax.models import Model, lora
from rlhf_jax.models.io import hf
from rlhf_jax.models.io import peft as peft_files
from rlhf_jax.models.io.safetensors import open_file
from rlhf_jax.models.linear import frozen_product, product
from tests.helpers import families
from tests.helpers.adapters import assert_gradients_equal
from tests.helpers.arrays import distance
from tests.helpers.models_common import padded_rows, reference, reference_inputs
from tests.helpers.optional import optional

peft, torch = optional("peft"), optional("torch")
LINEARS = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
FORM = lora.Lora(r=3, alpha=5, dropout=0.0, target_modules=LINEARS, use_rslora=True)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """{kind: folder} of a base, every weight random."""
    folder = tmp_path_factory.mktemp("bases")
    for kind in ("causal", "scalar"):
        reference(kind).save_pretrained(folder / kind)
    return {kind: folder / kind for kind in ("causal", "scalar")}


def rows():
    return padded_rows([5, 8], [3, 0], 8)


def peft_model(kind, targets, r, alpha, rslora, saved=None, seed=1):
    """A torch model with an adapter of which every number is random, and which moves the model alike at every scale:
    of one that drowns its base float32 itself loses the fifth digit of a gradient."""
    task = {"causal": "CAUSAL_LM", "scalar": "SEQ_CLS"}[kind]
    config = peft.LoraConfig(
        r=r, lora_alpha=alpha, target_modules=targets, use_rslora=rslora, task_type=task, modules_to_save=saved
    )
    model = peft.get_peft_model(reference(kind), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                size = 0.2 / max(1.0, alpha / r) if "lora_B" in name else 0.2
                parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def outputs(kind, model, params):
    """Logits of every token, or the score of each row's last, of `rows`."""
    tokens, mask = rows()
    hidden = model.hidden(params, tokens, mask)
    if kind == "causal":
        return jnp.where(mask[..., None], model.logits(params, hidden), 0.0)
    last = tokens.shape[1] - 1 - jnp.argmax(mask[:, ::-1], axis=1)
    return model.scalars(params, hidden[jnp.arange(len(last)), last])


def torch_outputs(kind, model):
    tokens, mask = rows()
    found = model(**reference_inputs(tokens, mask)).logits
    return found * torch.tensor(mask)[..., None] if kind == "causal" else found[:, 0]


def loaded(base, folder, kind):
    """(model with the adapter's form, base params, adapters)"""
    model, params = hf.load(base, kind="causal" if kind == "causal" else "backbone")
    if kind == "scalar":
        params["score"] = model.init_score(jax.random.key(0))
    form, adapters = hf.load_adapter(folder, model)
    return dataclasses.replace(model, lora=form), params, adapters


@settings(max_examples=6, deadline=None)
@given(
    targets=st.sets(st.sampled_from(LINEARS), min_size=1),
    r=st.integers(1, 6),
    alpha=st.integers(1, 40),
    rslora=st.booleans(),
)
def test_any_adapter_of_peft_gives_its_logits_and_its_gradients(bases, tmp_path_factory, targets, r, alpha, rslora):
    folder = tmp_path_factory.mktemp("adapter")
    theirs = peft_model("causal", sorted(targets), r, alpha, rslora)
    theirs.save_pretrained(folder)
    model, base, adapters = loaded(bases["causal"], folder, "causal")
    assert model.lora == lora.Lora(r, alpha, 0.0, tuple(n for n in LINEARS if n in targets), rslora)

    def loss(adapters):
        found = outputs("causal", model, model.with_lora(base, adapters))
        return jnp.sum(jnp.sin(found)), found

    grads, found = jax.jit(jax.grad(loss, has_aux=True))(adapters)
    wanted = torch_outputs("causal", theirs)
    assert distance(found, wanted.detach()) < 1e-5
    torch.sin(wanted).sum().backward()
    assert_gradients_equal(folder / "grads", model, grads, theirs, 1e-5)


@pytest.mark.parametrize("kind", ["causal", "scalar"])
def test_adapters_of_ours_load_in_peft_and_give_the_same_outputs(bases, tmp_path, kind):
    model, base = hf.load(bases[kind], kind=kind)
    model = dataclasses.replace(model, lora=dataclasses.replace(FORM, modules_to_save=("final_layer_norm",)))
    adapters = lora.init(model, jax.random.key(0), base)
    if kind == "scalar":
        adapters["score"] = base["score"]
    noise = np.random.default_rng(0)
    adapters = jax.tree.map(lambda x: x + 0.1 * noise.standard_normal(x.shape).astype(np.float32), adapters)
    peft_files.save(tmp_path, model, adapters, kind=kind, base=str(bases[kind]))
    theirs = peft.PeftModel.from_pretrained(reference(kind, seed=0), tmp_path).eval()
    found = outputs(kind, model, model.with_lora(base, adapters))
    assert distance(found, torch_outputs(kind, theirs).detach()) < 1e-5
    loader = {"causal": peft.AutoPeftModelForCausalLM, "scalar": peft.AutoPeftModelForSequenceClassification}[kind]
    theirs = loader.from_pretrained(tmp_path, **({"num_labels": 1} if kind == "scalar" else {})).eval()
    assert distance(found, torch_outputs(kind, theirs).detach()) < 1e-5


def test_a_head_of_pefts_classifier_comes_with_its_adapter(bases, tmp_path):
    theirs = peft_model("scalar", ["dense"], 2, 4, False)
    theirs.save_pretrained(tmp_path)
    model, base, adapters = loaded(bases["scalar"], tmp_path, "scalar")
    assert model.lora.modules_to_save == ("score",)
    wanted = torch_outputs("scalar", theirs).detach()
    assert distance(outputs("scalar", model, model.with_lora(base, adapters)), wanted) < 1e-5


def test_a_causal_head_that_peft_trains_in_full_is_read(bases, tmp_path):
    theirs = peft_model("causal", ["dense"], 2, 4, False, saved=["lm_head"])
    theirs.save_pretrained(tmp_path)
    model, base, adapters = loaded(bases["causal"], tmp_path, "causal")
    assert model.lora.modules_to_save == ("embed_out",)
    wanted = torch_outputs("causal", theirs).detach()
    assert distance(outputs("causal", model, model.with_lora(base, adapters)), wanted) < 1e-5
    peft_files.save(tmp_path / "ours", model, adapters, kind="causal", base=None)
    again = peft.PeftModel.from_pretrained(reference("causal"), tmp_path / "ours").eval()
    assert distance(torch_outputs("causal", again).detach(), wanted) < 1e-6


# --- merged


def test_merged_equals_unmerged_in_a_forward_pass_in_decoding_and_read_as_a_checkpoint(bases, tmp_path):
    theirs = peft_model("causal", "all-linear", 3, 5, True)
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / peft_files.CONFIG).read_text())
    (tmp_path / peft_files.CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": str(bases["causal"])}))
    model, base, adapters = loaded(bases["causal"], tmp_path, "causal")
    joined = model.with_lora(base, adapters)
    wanted = outputs("causal", model, joined)
    plain = dataclasses.replace(model, lora=None)
    assert distance(outputs("causal", plain, lora.merge_lora(joined)), wanted) < 1e-5

    read_model, read = hf.load(tmp_path, kind="causal")
    assert read_model == plain
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), read, lora.merge_lora(joined))

    tokens, mask = rows()
    unstacked = model.unstack(joined)
    assert "lora_a" not in unstacked["backbone"]["layers"][0]["attention"]["dense"]
    hidden, _ = model.prefill(unstacked, tokens, mask)
    assert mask[:, -1].all()
    assert distance(model.next_logits(unstacked, hidden), wanted[:, -1]) < 1e-5


def test_an_adapter_on_an_adapter_is_merged_from_the_ground_up(bases, tmp_path):
    for number, (name, on) in enumerate((("first", bases["causal"]), ("second", tmp_path / "first"))):
        peft_model("causal", ["dense"], 2, 4, False, seed=number).save_pretrained(tmp_path / name)
        path = tmp_path / name / peft_files.CONFIG
        path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": str(on)}))
    _, base = hf.load(bases["causal"])
    parts = [hf.load(tmp_path / name)[1] for name in ("first", "second")]
    model, _ = hf.load(bases["causal"])
    form, second = hf.load_adapter(tmp_path / "second", model)
    wanted = lora.merge_lora(lora.with_lora(form, parts[0], second))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), parts[1], wanted)
    moved = parts[0]["backbone"]["layers"]["attention"]["dense"]["kernel"]
    assert distance(moved, base["backbone"]["layers"]["attention"]["dense"]["kernel"]) > 0.01
    assert "+" in hf.fingerprint(tmp_path / "second") and hf.fingerprint(tmp_path / "second").count("+") == 2


# --- a new adapter


def test_a_new_adapter_changes_nothing_and_is_drawn_as_peft_draws_it(bases):
    model, base = hf.load(bases["causal"])
    model = dataclasses.replace(model, lora=dataclasses.replace(FORM, r=64))
    adapters = lora.init(model, jax.random.key(0), base)
    plain = dataclasses.replace(model, lora=None)
    found = outputs("causal", model, model.with_lora(base, adapters))
    np.testing.assert_array_equal(found, outputs("causal", plain, base))
    for name in LINEARS:
        part = lora.get_path(adapters, ("backbone", *model.family.linears[name]))
        bound = part["lora_a"].shape[1] ** -0.5
        assert not part["lora_b"].any()
        assert 0.95 * bound < np.abs(part["lora_a"]).max() <= bound
        assert abs(float(np.std(part["lora_a"])) - bound / 3**0.5) < 0.03 * bound


def test_only_adapters_get_a_gradient_and_frozen_kernels_pass_it_on():
    key = jax.random.split(jax.random.key(0), 4)
    x, kernel, bias = (jax.random.normal(k, s) for k, s in zip(key, ((5, 4), (4, 3), (3,))))

    def total(times, x, kernel):
        return jnp.sum(jnp.sin(times(None, (None, None), jnp.dtype("float32"), x, kernel, bias)))

    to_x, to_kernel = jax.grad(total, argnums=(1, 2))(frozen_product, x, kernel)
    np.testing.assert_allclose(to_x, jax.grad(total, argnums=1)(product, x, kernel), rtol=1e-6)
    assert not to_kernel.any()


def test_dropout_of_an_adapters_input_belongs_to_the_row_and_to_the_layer(bases):
    model, base = hf.load(bases["causal"])
    form = dataclasses.replace(FORM, dropout=0.5, r=8)
    model = dataclasses.replace(model, lora=form, config=dataclasses.replace(model.config, hidden_dropout=0.0))
    adapters = jax.tree.map(lambda x: x + 0.1, lora.init(model, jax.random.key(0), base))
    params, (tokens, mask) = model.with_lora(base, adapters), padded_rows([8, 8, 8], [0, 0, 0], 8)
    tokens[2] = tokens[0]
    keys = jax.random.split(jax.random.key(3), 3)
    together = model.hidden(params, tokens, mask, dropout_key=keys)
    alone = model.hidden(params, tokens[1:2], mask[1:2], dropout_key=keys[1:2])
    assert distance(alone[0], together[1]) < 1e-5
    assert distance(together[2], together[0]) > 1e-2  # the same row under another key
    none = dataclasses.replace(model, lora=dataclasses.replace(form, dropout=0.0))
    without = none.hidden(params, tokens, mask, dropout_key=keys)
    assert distance(without, model.hidden(params, tokens, mask)) < 1e-6 < distance(together, without)


# --- what is refused


def with_config(bases, folder, **changes):
    peft_model("causal", ["dense"], 2, 4, False).save_pretrained(folder)
    path = folder / peft_files.CONFIG
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": str(bases["causal"])} | changes)
    )
    return folder


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"use_dora": True}, "use_dora"),
        ({"rank_pattern": {"dense": 3}}, "rank_pattern"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"r": 0}, "r is 0"),
        ({"lora_alpha": "big"}, "lora_alpha is 'big'"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path is missing"),
        ({"base_model_name_or_path": "/nowhere/at/all"}, "adapter_config.json: base_model_name_or_path"),
        ({"r": 3}, "lora_A.*has shape"),
    ],
)
def test_an_adapter_that_is_not_plain_lora_is_refused_by_its_key(bases, tmp_path, changes, words):
    with pytest.raises(UserError, match=words):
        hf.load(with_config(bases, tmp_path, **changes))


def test_an_adapter_that_stands_on_itself_is_refused(bases, tmp_path):
    with pytest.raises(UserError, match="leads back"):
        hf.load(with_config(bases, tmp_path, base_model_name_or_path=str(tmp_path)))


def test_a_missing_or_foreign_tensor_is_named(bases, tmp_path):
    folder = with_config(bases, tmp_path)
    tensors = {name: source.read((slice(None),) * 2) for name, source in open_file(folder / peft_files.WEIGHTS).items()}
    gone = sorted(tensors)[0]
    for changed, words in (
        ({name: x for name, x in tensors.items() if name != gone}, f"tensor {gone} is missing"),
        ({**tensors, "base_model.model.gpt_neox.layers.9.attention.dense.lora_A.weight": tensors[gone]}, "layers.9"),
    ):
        peft_files.write_file(folder / peft_files.WEIGHTS, changed)
        with pytest.raises(UserError, match=words):
            hf.load(folder)


@pytest.mark.parametrize(("names", "words"), [(["q_proj"], "'q_proj'.*gpt_neox"), ([], "names no layer")])
def test_layers_that_the_family_does_not_have_are_named(bases, names, words):
    model = hf.load_model(bases["causal"])
    with pytest.raises(UserError, match=words):
        lora.resolve_targets(model, names, "lora_target_modules")
    assert lora.resolve_targets(model, ["all-linear"], "") == LINEARS
    assert lora.resolve_targets(model, None, "") == ("query_key_value",)


# A family, and target_modules as PEFT takes them: a string is a regular expression, or 'all-linear'.
TARGETS = [
    ("llama", r".*\.(q|k|v)_proj"),
    ("llama", r"model\.layers\.\d{1,2}\.self_attn\..*"),
    ("llama", "all-linear"),
    ("llama", ["self_attn.q_proj", "down_proj"]),
    ("gpt2", r".*c_proj"),
    ("gpt2", r"transformer\.h\.[01]\.mlp\.c_(fc|proj)"),
    ("gpt2", ["c_proj"]),
    ("phi3", r".*(qkv|down)_proj"),
    ("gemma3_text", r".*layers.*mlp.(gate|up|down)_proj"),
]


@pytest.mark.parametrize(("family", "targets"), TARGETS, ids=str)
def test_targets_adapt_the_modules_that_peft_adapts_and_its_adapters_are_read(tmp_path, family, targets):
    base = families.reference(family)
    base.save_pretrained(tmp_path / "base")
    model, params = hf.load(tmp_path / "base")
    theirs = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM"))
    if isinstance(targets, str):  # PEFT rewrites 'all-linear' to a list
        theirs.peft_config["default"].target_modules = targets
    adapted = {name.partition(".lora_A")[0] for name, _ in theirs.named_parameters() if ".lora_A" in name}
    names = [targets] if isinstance(targets, str) else targets
    ours = lora.resolve_targets(model, names, "lora_target_modules")
    places = {
        f"{model.family.prefix}{tensor.name.removesuffix('.weight')}": tensor.path[:-1]
        for tensor in model.family.tensors(model.config)
        if tensor.path[-1] == "kernel"
    }
    paths = {model.family.linears[name] for name in ours}
    assert {f"base_model.model.{name}" for name, path in places.items() if path in paths} == adapted

    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    theirs.save_pretrained(tmp_path / "adapter")
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_modules"]
    assert isinstance(written, str) == isinstance(targets, str)
    form, adapters = hf.load_adapter(tmp_path / "adapter", model)
    assert form.target_modules == ours
    tokens, mask = rows()
    whole = dataclasses.replace(model, lora=form)
    hidden = whole.hidden(whole.with_lora(params, adapters), tokens, mask)
    logits = whole.logits(whole.with_lora(params, adapters), hidden)
    expected = theirs.eval()(**reference_inputs(tokens, mask)).logits.detach().numpy()
    assert distance(np.where(mask[..., None], logits, 0), np.where(mask[..., None], expected, 0)) < 1e-5


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (["nothing_.*"], "nothing_"),
        ([r"q_pro"], "'q_pro'"),
        ([r"model\.layers\.0\..*_proj"], "in 1 of 2 layers"),
        (["model.layers.1.self_attn.q_proj"], "q_proj in 1 of 2 layers"),
        ([r".*"], "also matches"),
        ([r".*(lm_head|q_proj)"], "also matches lm_head"),
        ([r".*\.(q_proj"], "regular expression"),
        ([r".*q_proj", r".*v_proj"], "q_proj"),
        ([""], "''"),
    ],
    ids=str,
)
def test_patterns_of_no_layer_of_some_layers_and_of_more_than_layers_are_refused(targets, words):
    config = families.config_of("llama").to_dict()
    model = Model.from_hf_config({**config, "architectures": ["LlamaForCausalLM"]})
    with pytest.raises(UserError, match=f"lora_target_modules.*{words}"):
        lora.resolve_targets(model, targets, "lora_target_modules")
