"""Images of rows: tiles and ids equal those of transformers' processor; what is wrong with a row is said."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rlhf_jax import data
from rlhf_jax.config import RLOOConfig, SFTConfig
from rlhf_jax.data import files, images
from rlhf_jax.errors import UserError
from tests.helpers import vision as tiny
from tests.helpers.made_data import make_demonstrations, make_prompts
from tests.helpers.optional import optional

pil = optional("PIL.Image")
QUICK = settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate,),
)
USER = [{"role": "user", "content": "w1 w2"}]


@pytest.fixture(scope="module")
def of(tmp_path_factory):
    """{whether images are split: (tokenizer, processor, folder)}"""
    made = {}
    for splitting in (False, True):
        folder = tmp_path_factory.mktemp("processor")
        tiny.save_processor(folder, splitting)
        tokenizer = data.load_tokenizer(str(folder), vocab_size=60)
        options = {"image_token_id": tiny.IMAGE, "tokens": tiny.TOKENS, "size": tiny.SIZE}
        made[splitting] = tokenizer, images.load_processor(str(folder), tokenizer, name="tiny", **options), folder
    return made


def prompts(of, rows, splitting=False, **options):
    tokenizer, processor, _ = of[splitting]
    return make_prompts(files.from_list(rows, "rows"), tokenizer, processor=processor, **options)


def png(seed=0, width=20, height=12, mode="RGB") -> bytes:
    buffer = io.BytesIO()
    tiny.picture(seed, width, height, mode).save(buffer, "PNG")
    return buffer.getvalue()


@settings(QUICK, max_examples=12)
@given(
    width=st.integers(1, 90),
    height=st.integers(1, 90),
    mode=st.sampled_from(("RGB", "RGBA", "L", "LA", "P", "1", "CMYK")),
    splitting=st.booleans(),
)
def test_tiles_and_text_equal_transformers(of, width, height, mode, splitting):
    """Of images of any size and mode."""
    processing = pytest.importorskip("transformers.models.smolvlm.processing_smolvlm")
    _, processor, _ = of[splitting]
    image = tiny.picture(width * height, width, height, mode)
    theirs = processor.hf.preprocess([[image]], return_row_col_info=True)
    ours, rows, columns = processor.tiles(image)
    assert (rows, columns) == (theirs["rows"][0][0], theirs["cols"][0][0]) == processor.grid(image)
    mean, std = (np.array(x).reshape(1, 3, 1, 1) for x in ([0.5, 0.4, 0.6], [0.5, 0.6, 0.4]))
    np.testing.assert_allclose((ours / 255 - mean) / std, np.asarray(theirs["pixel_values"])[0], atol=1e-6)
    tokens = ("<fake_token_around_image>", "<image>", "<global-img>")
    wanted = processing.get_image_prompt_string(rows, columns, tiny.TOKENS, *tokens)
    assert processor.image_text(rows, columns) == wanted


def test_prompts_with_no_one_and_several_images_in_one_batch(of):
    rows = [
        {"prompt": USER, "images": []},
        {"prompt": USER, "images": [png(1)]},
        {"prompt": USER, "images": [png(2, 40, 20), png(3)]},
        {"prompt": USER, "images": None},
    ]
    made = prompts(of, rows, splitting=True)
    counts = [int((ids == tiny.IMAGE).sum()) for ids in made.tokens]
    tiles = [0, 5, 7 + 5, 0]  # 20 x 12 is enlarged to 48 x 32: 2 rows of 3, and the whole
    tiles = [sum(of[True][1].tiles(source.read())[0].shape[0] for source in row) for row in made.images.sources]
    assert counts == [tiny.TOKENS * n for n in tiles] and tiles[0] == tiles[3] == 0 and tiles[2] > tiles[1] > 1
    batch = made.batch_from_rows(np.array([2, 0]))
    assert batch.images.pixels.shape == (2, max(tiles), 3, tiny.SIZE, tiny.SIZE)
    assert batch.images.pixels.dtype == np.uint8 and not batch.images.pixels[1].any()
    first = of[True][1].tiles(made.images.sources[2][0].read())[0]
    np.testing.assert_array_equal(batch.images.pixels[0, : len(first)], first)
    assert made.columns([1, 0])["images"][0][0].size == (20, 12) and made.columns([1, 0])["images"][1] == []


def test_images_stand_before_the_first_text_of_the_user_or_in_their_blocks(of):
    system = {"role": "system", "content": "w5"}
    later = [*USER, {"role": "assistant", "content": "w6"}, {"role": "user", "content": "w7"}]
    blocks = [{"type": "text", "text": "w3"}, {"type": "image"}, {"type": "text", "text": "w4"}]
    own = [{"type": "image", "image": png(1)}, {"type": "text", "text": "w3"}]
    rows = [
        {"prompt": [system, *later], "image": png()},
        {"prompt": [{"role": "user", "content": blocks}], "image": png()},
        {"prompt": [{"role": "user", "content": own}], "image": None},
    ]
    made = prompts(of, rows)
    assert [" ".join(text.split()) for text in made.display_texts([0, 1, 2])] == [
        "<|im_start|>system: w5 <end_of_utterance> user: <image> w1 w2 <end_of_utterance> assistant: w6 "
        "<end_of_utterance> user: w7 <end_of_utterance> assistant:",
        "<|im_start|>user: w3 <image> w4 <end_of_utterance> assistant:",
        "<|im_start|>user: <image> w3 <end_of_utterance> assistant:",
    ]
    assert made.columns([0, 2])["image"][0].size == (20, 12)
    filled = made.texts([1])[0][0]["content"]
    assert [block["type"] for block in filled] == ["text", "image", "text"] and filled[1]["image"].size == (20, 12)


def test_messages_beside_images_may_call_tools_without_content(of):
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "w1"}}]}
    rows = [{"prompt": [*USER, call, {"role": "user", "content": "w8"}], "images": [png()]}]
    made = prompts(of, rows)
    assert made.display_texts([0])[0].count("assistant:") == 2
    assert made.texts([0])[0][1] == call


@pytest.mark.runs  # TRL is slow to import
def test_trl_places_the_images_alike(of):
    prepare = pytest.importorskip("trl.data_utils").prepare_multimodal_messages
    prompt = [{"role": "system", "content": "w5"}, *USER, {"role": "user", "content": "w8"}]
    theirs = prepare(prompt, images=[1, 2])
    read = images.read_row(
        {"prompt": prompt, "images": [png(), png()]}, ("prompt",), of[False][1], None, lambda row: None
    )
    plain = [
        {**m, "content": [{k: v for k, v in block.items() if k != "image"} for block in m["content"]]} for m in theirs
    ]
    assert read.messages["prompt"] == plain


def test_demonstrations_are_not_trained_on_image_tokens(of):
    tokenizer, processor, _ = of[False]
    answer = [{"role": "assistant", "content": "w9"}]
    rows = [{"prompt": USER, "completion": answer, "images": [png()]}, {"prompt": USER, "completion": answer}]
    made = make_demonstrations(files.from_list(rows, "rows"), tokenizer, processor=processor)
    batch = made.batch_from_rows(np.array([0, 1]))
    np.testing.assert_array_equal(batch.loss_mask, (batch.tokens != tiny.IMAGE) & (batch.tokens != tiny.PAD))
    assert batch.images.pixels.shape[:2] == (2, 1) and list(made.prompt_lengths) == [13, 6]
    changed = make_demonstrations(
        files.from_list([{**rows[0], "images": [png(9)]}, rows[1]], "rows"), tokenizer, processor=processor
    )
    assert changed.fingerprint != made.fingerprint


def test_a_datasets_image_column_is_kept_encoded_and_paths_are_found_beside_the_data(of, tmp_path):
    datasets = pytest.importorskip("datasets")
    tokenizer, processor, _ = of[False]
    table = datasets.Dataset.from_list(
        [{"prompt": USER, "image": {"bytes": png(), "path": None}}],
        features=datasets.Features(
            prompt=[{"role": datasets.Value("string"), "content": datasets.Value("string")}], image=datasets.Image()
        ),
    )
    made = make_prompts(files.from_dataset(table, "table"), tokenizer, processor=processor)
    assert isinstance(made.images.sources[0][0].value, bytes)
    (tmp_path / "one.png").write_bytes(png())
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": USER, "images": ["one.png"]}))
    beside = make_prompts(files.read_file(str(tmp_path / "rows.jsonl")), tokenizer, processor=processor)
    np.testing.assert_array_equal(beside.images.batch([0]).pixels, made.images.batch([0]).pixels)


def test_exif_orientation_and_16_bit_grey_are_read_as_they_are_seen(of):
    turned, buffer = tiny.picture(0, 20, 12), io.BytesIO()
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(buffer, "PNG", exif=exif)
    assert images.image_source(buffer.getvalue()).read().size == (12, 20)
    grey = pil.fromarray(np.full((4, 4), 32_768, np.uint16))
    assert (
        np.asarray(images.image_source(grey).read()).flat[0] == 127
        or np.asarray(images.image_source(grey).read()).flat[0] == 128
    )


def bomb() -> bytes:
    """A PNG that says it has 100,000 x 100,000 pixels."""
    content = bytearray(png())
    content[16:24] = (100_000).to_bytes(4, "big") * 2
    import zlib

    content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
    return bytes(content)


def blocks(*content):
    return [{"role": "user", "content": list(content)}]


TEXT = {"type": "text", "text": "w1"}
BAD = {  # kind: (row, what its message names)
    "no image format": ({"prompt": USER, "images": [b"hello"]}, ("image 1", "Pillow")),
    "cut off": ({"prompt": USER, "images": [png(0, 60, 60)[:300]]}, ("image 1", "broken")),
    "no bytes": ({"prompt": USER, "images": [b""]}, ("image 1", "empty")),
    "no such file": ({"prompt": USER, "images": ["nowhere.png"]}, ("image 1", "nowhere.png")),
    "an address": ({"prompt": USER, "images": ["https://example.org/a.png"]}, ("image 1", "example.org", "downloaded")),
    "too large": ({"prompt": USER, "images": [bomb()]}, ("image 1", "large")),
    "a number": ({"prompt": USER, "images": [3]}, ("image 1", "an int")),
    "null in the list": ({"prompt": USER, "images": [None]}, ("image 1", "NoneType")),
    "an object without image": ({"prompt": USER, "images": [{"path": None, "bytes": None}]}, ("'bytes'", "'path'")),
    "an array of floats": ({"prompt": USER, "images": [np.zeros((4, 4, 3))]}, ("float64", "uint8")),
    "an array of 5 channels": ({"prompt": USER, "images": [np.zeros((4, 4, 5), np.uint8)]}, ("[4, 4, 5]",)),
    "no list": ({"prompt": USER, "images": png()}, ("'images'", "list", "'image'")),
    "more images than places": ({"prompt": blocks(TEXT), "images": [png()]}, ("1 images", "places for 0")),
    "more places than images": ({"prompt": blocks({"type": "image"}, TEXT), "images": []}, ("message 1", "too few")),
    "placeholder as text": ({"prompt": [{"role": "user", "content": "w1 <image>"}]}, ("message 1", "<image>")),
    "placeholder in a block": ({"prompt": blocks({"type": "text", "text": "<image>"})}, ("message 1", "<image>")),
    "a video": ({"prompt": blocks(TEXT, {"type": "video"})}, ("message 1", "'video'")),
    "text without text": ({"prompt": blocks({"type": "text"}, TEXT)}, ("message 1", "'text'")),
    "another role": ({"prompt": [{"role": "robot", "content": "w1"}, *USER]}, ("message 1", "'robot'")),
    "text as prompt": ({"prompt": "w1", "images": [png()]}, ("'prompt'",)),
    "a block that is text": ({"prompt": [{"role": "user", "content": ["w1"]}]}, ("message 1", "'content'")),
    "ends with the assistant": ({"prompt": [*USER, {"role": "assistant", "content": "w1"}]}, ("assistant",)),
    "second image broken": ({"prompt": USER, "images": [png(), b"x"]}, ("image 2",)),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_row_is_named_and_may_be_left_out(of, kind):
    row, names = BAD[kind]
    rows = [{"prompt": USER, "images": [png()]}, row]
    with pytest.raises(UserError) as error:
        prompts(of, rows)
    assert all(name in str(error.value) for name in ("rows, row 2", *names))
    assert len(prompts(of, rows, on_bad_row="skip")) == 1


def test_a_template_that_does_not_write_the_placeholder_is_named(of):
    with pytest.raises(UserError, match=r"0 <image> for 1 images"):
        prompts(of, [{"prompt": USER, "images": [png()]}], chat_template_kwargs={"chat_template": "{{ 'w1' }}"})


def test_rows_that_are_too_long_are_dropped_with_their_images(of):
    rows = [{"prompt": USER, "images": [png()]}, {"prompt": USER, "images": [png(), png(), png()]}]
    made = prompts(of, rows, query_length=20)
    assert len(made) == 1 and made.report.dropped == 1 and made.images.tiles == 1


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"image_processor_type": "CLIPImageProcessor"}, ("CLIPImageProcessor", "SmolVLMImageProcessor")),
        ({"max_image_size": {"longest_edge": 24}}, ("24", "16", "max_image_size")),
        ({"do_resize": False, "do_image_splitting": False}, ("do_resize",)),
    ],
)
def test_a_processor_that_does_not_fit_is_refused(tmp_path, change, names):
    tiny.save_processor(tmp_path)
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    tokenizer = data.load_tokenizer(str(tmp_path), vocab_size=60)
    options = {"name": "tiny", "image_token_id": tiny.IMAGE, "tokens": tiny.TOKENS, "size": tiny.SIZE}
    with pytest.raises(UserError) as error:
        images.load_processor(str(tmp_path), tokenizer, **options)
    assert all(name in str(error.value) for name in names)


def test_a_processor_that_is_missing_or_of_other_ids_is_refused(of, tmp_path):
    tokenizer, _, folder = of[False]
    options = {"name": "tiny", "tokens": tiny.TOKENS, "size": tiny.SIZE}
    with pytest.raises(UserError, match="image_token_id is 3"):
        images.load_processor(str(folder), tokenizer, **options, image_token_id=3)
    with pytest.raises(UserError, match="preprocessor_config"):
        images.load_processor(str(tmp_path), tokenizer, **options, image_token_id=tiny.IMAGE)


@pytest.mark.parametrize("config", [RLOOConfig, SFTConfig])
def test_images_of_several_data_sets_are_refused(of, config):
    tokenizer, processor, _ = of[False]
    kind = data.DemoData if config is SFTConfig else data.PromptData
    with pytest.raises(UserError, match="datasets: images are read from one data set"):
        data.load(kind, config(datasets=({"path": "a"}, {"path": "b"})), tokenizer, processor=processor)
