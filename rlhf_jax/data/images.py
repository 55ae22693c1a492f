"""Images of prompts: reading them, their tiles, and the image tokens that stand for them, on the host.

The tiles are those of transformers' image processor in its PIL form, which needs pillow and neither torch nor
torchvision. Shape letters: P prompts, I tiles of a prompt, S pixels on a side of a tile.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import importlib
import io
import itertools
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_jax import storage
from rlhf_jax.data import chat
from rlhf_jax.data.files import MalformedRow, Rows, type_with_article
from rlhf_jax.data.ragged import Lazy
from rlhf_jax.data.tokenized import Encoded, Kind, Tokenized
from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.errors import UserError
from rlhf_jax.types import Images

COLUMNS = ("images", "image")
"""Columns of images, in TRL's order: a list for each row, else one image."""
CLASSES = {
    "SmolVLMImageProcessor": ("transformers.models.smolvlm.image_processing_pil_smolvlm", "SmolVLMImageProcessorPil"),
    "Idefics3ImageProcessor": (
        "transformers.models.idefics3.image_processing_pil_idefics3",
        "Idefics3ImageProcessorPil",
    ),
}
"""Image processors without their suffixes, and where transformers has their PIL form."""
_FILES = ("processor_config.json", "preprocessor_config.json")
THUMBNAIL = 64
"""Pixels on the longer side of a thumbnail."""
_FIRST = 1000
"""Rows that are searched for images in their conversations."""
_ROLES = ("system", "user", "assistant", "tool")
_INSTALL = "pip install 'rlhf_jax[vision]'"


class ImageError(UserError):
    """A row's image or its placeholder is wrong."""


# --- one image


@dataclasses.dataclass(frozen=True)
class ImageSource:
    """An image as the data has it: encoded, in a file, or decoded. It is read again whenever it is needed."""

    value: Any
    """bytes, a path, or a PIL.Image."""

    def read(self) -> Any:
        """The PIL.Image in a mode of 8 bits, turned as its EXIF says; ImageError where it is broken."""
        pil = pillow()
        value = self.value
        try:
            if isinstance(value, bytes):
                image = pil.Image.open(io.BytesIO(value))
            elif isinstance(value, str):
                image = pil.Image.open(value)
            else:
                image = value
            return _loaded(image)
        except FileNotFoundError:
            raise ImageError(f"there is no file {value}") from None
        except pil.UnidentifiedImageError:
            what = f"{value} " if isinstance(value, str) else ""
            raise ImageError(f"{what}is no image that Pillow can read") from None
        except pil.Image.DecompressionBombError as error:
            raise ImageError(f"the image is too large: {error}") from None
        except Exception as error:  # a broken file can raise nearly anything
            raise ImageError(f"the image is broken: {str(error) or type(error).__name__}") from None

    @property
    def digest(self) -> bytes:
        """sha256 of its bytes."""
        value = self.value
        if isinstance(value, str):
            with open(value, "rb") as file:
                value = file.read()
        elif not isinstance(value, bytes):
            value = f"{value.mode}{value.size}".encode() + value.tobytes()
        return hashlib.sha256(value).digest()


def pillow() -> Any:
    """The package PIL; a UserError that names the extra where it is missing."""
    try:
        import PIL
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise UserError(f"images need Pillow: {_INSTALL}") from error
    return PIL


def _loaded(image: Any) -> Any:
    pil = pillow()
    if image.width < 1 or image.height < 1:
        raise ImageError(f"the image has {image.width} x {image.height} pixels")
    image.load()
    image = pil.ImageOps.exif_transpose(image)
    if image.mode.startswith("I") or image.mode == "F":  # 16 bits and more: convert() would clip them to 255
        array = np.asarray(image, np.float64)
        least, most = float(np.nanmin(array)), float(np.nanmax(array))
        if not np.isfinite((least, most)).all():
            raise ImageError("the image has pixels that are not finite")
        scale = 255.0 if image.mode == "F" and most <= 1.0 else 1.0 if most <= 255 else 255.0 / 65_535
        image = pil.Image.fromarray(np.clip(np.rint(array * scale), 0, 255).astype(np.uint8))
    return image


def image_source(value: Any, folder: str | None = None) -> ImageSource:
    """An image as a data set may give it: a PIL.Image, bytes, {"bytes", "path"} as `datasets` has it, a path, absolute
    or within `folder`, or an array [H, W] or [H, W, 1, 3 or 4] of uint8. ImageError for anything else."""
    if isinstance(value, Mapping):
        if value.get("bytes") is None and value.get("path") is None:
            raise ImageError("an object without 'bytes' and 'path' is no image")
        value = value["path"] if value.get("bytes") is None else value["bytes"]
    if isinstance(value, bytes | bytearray):
        if not value:
            raise ImageError("the image is empty: it has no bytes")
        return ImageSource(bytes(value))
    if isinstance(value, str | os.PathLike):
        path = os.fspath(value)
        if re.match(r"[a-z]+://|data:", path, re.IGNORECASE):
            raise ImageError(f"{path:.60} is an address: images are not downloaded, give files or bytes")
        places = (os.path.join(folder, path) if folder else path, storage.absolute(path))  # read later
        return ImageSource(next(filter(os.path.exists, places), path))
    if isinstance(value, np.ndarray):
        if value.dtype != np.uint8 or value.ndim not in (2, 3) or (value.ndim == 3 and value.shape[2] not in (1, 3, 4)):
            raise ImageError(
                f"an array of {value.dtype} {list(value.shape)} is no image; give uint8 [H, W] or [H, W, 1, 3 or 4]"
            )
        return ImageSource(
            pillow().Image.fromarray(value[..., 0] if value.ndim == 3 and value.shape[2] == 1 else value)
        )
    if isinstance(value, pillow().Image.Image):
        return ImageSource(value)
    raise ImageError(f"{type_with_article(value)} is no image")


# --- the processor


@dataclasses.dataclass(frozen=True, eq=False)
class ImageProcessor:
    """The images of a model: their tiles, and their text.

    Attributes:
      hf: transformers' image processor, PIL form.
      name: where it comes from.
      image_token, image_token_id: what stands for an image token of the model.
      tokens: image tokens of a tile.
      size: S.
      fake_token, global_token: text around the image tokens.
    """

    hf: Any
    name: str
    image_token: str
    image_token_id: int
    tokens: int
    size: int
    fake_token: str = "<fake_token_around_image>"
    global_token: str = "<global-img>"
    _grids: dict[tuple[int, int], tuple[int, int]] = dataclasses.field(default_factory=dict)

    def tiles(self, image: Any) -> tuple[np.ndarray, int, int]:
        """An image as ([tiles, 3, S, S] uint8, rows, columns of tiles); 0 rows and columns: one tile, the image.

        Raises:
          ImageError: the image does not become whole tiles.
        """
        options = {"do_rescale": False, "do_normalize": False, "do_convert_rgb": True, "return_row_col_info": True}
        out = self.hf.preprocess([[image]], **options)
        pixels = np.asarray(out["pixel_values"])[0]
        unpadded = np.asarray(out.get("pixel_attention_mask", 1)).all()
        if pixels.shape[1:] != (3, self.size, self.size) or not unpadded:
            raise ImageError(
                f"an image of {image.width} x {image.height} becomes tiles of {pixels.shape[2]} x {pixels.shape[3]} by "
                f"{self.name}, but the model reads {self.size} x {self.size}"
            )
        if pixels.dtype != np.uint8:
            raise ImageError(f"the image processor of {self.name} returned {pixels.dtype}, not uint8")
        return pixels, int(out["rows"][0][0]), int(out["cols"][0][0])

    def grid(self, image: Any) -> tuple[int, int]:
        """(rows, columns) of an image's tiles, which depend on its size alone."""
        if image.size not in self._grids:
            self._grids[image.size] = self.tiles(image)[1:]
        return self._grids[image.size]

    def image_text(self, rows: int, columns: int) -> str:
        """What an image of a grid is in the prompt's text: its tiles row by row, then the whole image."""
        image, fake = self.image_token * self.tokens, self.fake_token
        if not rows and not columns:
            return f"{fake}{self.global_token}{image}{fake}"
        lines = (
            "".join(f"{fake}<row_{row}_col_{column}>{image}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        )
        return f"{''.join(lines)}\n{fake}{self.global_token}{image}{fake}"

    def expand(self, text: str, sources: Sequence[ImageSource]) -> tuple[str, int]:
        """A rendered text with each image token replaced by the text of an image, in order: (text, tiles).

        Raises:
          ImageError: an image is broken, or the text has another number of image tokens.
        """
        parts = text.split(self.image_token)
        if len(parts) - 1 != len(sources):
            raise ImageError(
                f"the chat template wrote {len(parts) - 1} {self.image_token} for {len(sources)} images: it must write "
                "one for each block of type 'image'"
            )
        out, tiles = [parts[0]], 0
        for number, (source, rest) in enumerate(zip(sources, parts[1:], strict=True), 1):
            try:
                rows, columns = self.grid(source.read())
            except ImageError as error:
                raise ImageError(f"image {number}: {error}") from None
            tiles += rows * columns + 1
            out += [self.image_text(rows, columns), rest]
        return "".join(out), tiles

    def encode(self, text: str, sources: Sequence[ImageSource], tokenizer: Tokenizer) -> tuple[list[int], int]:
        """(ids of a rendered text with its images, number of tiles). ImageError as `expand`."""
        text, tiles = self.expand(text, sources)
        ids = tokenizer.encode(text)
        if ids.count(self.image_token_id) != tiles * self.tokens:
            raise ImageError(
                f"the tokenizer {tokenizer.name!r} makes {ids.count(self.image_token_id)} ids {self.image_token_id} of "
                f"{tiles * self.tokens} {self.image_token}: it is not that of a model that reads images"
            )
        return ids, tiles

    def batch(self, rows: Sequence[Sequence[ImageSource]], tiles: int) -> Images:
        """The tiles of rows, [P, I, 3, S, S] uint8 for I = `tiles`; rows of fewer end in zeros."""
        pixels = np.zeros((len(rows), tiles, 3, self.size, self.size), np.uint8)
        for row, sources in zip(pixels, rows, strict=True):
            start = 0
            for source in sources:
                image_tiles = self.tiles(source.read())[0]
                row[start : start + len(image_tiles)] = image_tiles
                start += len(image_tiles)
        return Images(pixels, *self.normalization)

    @property
    def normalization(self) -> tuple[float, tuple[float, ...], tuple[float, ...]]:
        """(rescale_factor, mean, std) of `types.Images`."""
        factor = float(self.hf.rescale_factor) if self.hf.do_rescale else 1.0
        if not self.hf.do_normalize:
            return factor, (0.0,) * 3, (1.0,) * 3
        return factor, *(tuple(float(x) for x in values) for values in (self.hf.image_mean, self.hf.image_std))


def has_processor(folder: str) -> bool:
    """Whether a checkpoint's folder has an image processor."""
    return any(os.path.exists(os.path.join(folder, file)) for file in _FILES)


def load_processor(
    folder: str, tokenizer: Tokenizer, *, name: str, image_token_id: int, tokens: int, size: int
) -> ImageProcessor:
    """The image processor of a model.

    Args:
      name: where it comes from, for messages.
      image_token_id, tokens, size: of the model (see `ImageProcessor`).

    Raises:
      UserError: there is none, it is of another family, or it does not fit the model or the tokenizer.
    """
    pillow()
    if not has_processor(folder):
        raise UserError(f"the data has images, but {name} has no image processor ({' or '.join(_FILES)}).")
    try:
        from transformers import image_processing_utils

        content, _ = image_processing_utils.BaseImageProcessor.get_image_processor_dict(folder)
        kind = re.sub("(Fast|Pil)$", "", str(content.get("image_processor_type")))
        if kind not in CLASSES:
            raise UserError(
                f"{name}: image_processor_type {content.get('image_processor_type')!r} is not supported; supported: "
                f"{', '.join(CLASSES)}."
            )
        module, class_name = CLASSES[kind]
        hf = getattr(importlib.import_module(module), class_name).from_pretrained(folder)
    except ImportError as error:
        raise UserError(f"the data has images, whose processor could not be imported ({error}): {_INSTALL}") from error
    except UserError:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{name}: its image processor could not be read: {error}") from error
    if not hf.do_resize and not hf.do_image_splitting:
        raise UserError(f"{name}: do_resize and do_image_splitting are false; images of any size need one of them.")
    if hf.max_image_size["longest_edge"] != size:
        raise UserError(
            f"{name}: its image processor cuts tiles of {hf.max_image_size['longest_edge']} pixels (max_image_size), "
            f"but the model's vision_config has image_size {size}."
        )
    return _processor(hf, name, tokenizer, image_token_id, tokens, size)


def plain_processor(tokenizer: Tokenizer, *, image_token_id: int, tokens: int, size: int) -> ImageProcessor:
    """The image processor of a model from scratch, whose images are one tile each; the arguments are those of
    `load_processor`. UserError where transformers cannot be imported for it, or the tokenizer has no image token."""
    pillow()
    module, class_name = CLASSES["SmolVLMImageProcessor"]
    edge = {"longest_edge": size}
    hf = getattr(importlib.import_module(module), class_name)(size=edge, max_image_size=edge, do_image_splitting=False)
    return _processor(hf, "scratch_model", tokenizer, image_token_id, tokens, size)


def _processor(hf: Any, name: str, tokenizer: Tokenizer, image_token_id: int, tokens: int, size: int) -> ImageProcessor:
    image_token = image_token_text(tokenizer)
    if tokenizer.hf.convert_tokens_to_ids(image_token) != image_token_id:
        raise UserError(
            f"tokenizer {tokenizer.name!r} has id {tokenizer.hf.convert_tokens_to_ids(image_token)} for {image_token}, "
            f"but the model's image_token_id is {image_token_id}."
        )
    texts = {
        name: getattr(tokenizer.hf, attribute)
        for name, attribute in (("fake_token", "fake_image_token"), ("global_token", "global_image_token"))
        if getattr(tokenizer.hf, attribute, None)
    }
    return ImageProcessor(hf, name, image_token, image_token_id, tokens, size, **texts)


def image_token_text(tokenizer: Tokenizer) -> str:
    """The text of the image token."""
    return getattr(tokenizer.hf, "image_token", None) or "<image>"


def find_image_token_id(tokenizer: Tokenizer) -> int:
    """The id of the image token; UserError where the tokenizer has none."""
    token = image_token_text(tokenizer)
    if token not in tokenizer.hf.get_vocab():
        raise UserError(f"the data has images, but tokenizer {tokenizer.name!r} has no token {token}")
    return int(tokenizer.hf.convert_tokens_to_ids(token))


# --- rows


def image_column(rows: Rows) -> str | None:
    """The column of images; None where there is none."""
    return next((name for name in COLUMNS if name in rows.column_names), None)


def holds_images(rows: Rows, columns: Sequence[str]) -> bool:
    """Whether rows have images: a column of them, or among the first rows a conversation of `columns` with a block of
    type 'image'."""
    return image_column(rows) is not None or _holds_blocks(rows, columns)


def holds_decoded(rows: Rows, columns: Sequence[str]) -> bool:
    """Whether the first rows have images that are not texts; a text could be a file's name or anything else."""
    column, first = image_column(rows), itertools.islice(encoded(rows), _FIRST)
    for row in first if column else ():
        value = None if isinstance(row, MalformedRow) else row.get(column)
        for image in value if isinstance(value, list | tuple) else (value,):
            if image is not None:
                return not isinstance(image, str)
    return _holds_blocks(rows, columns)


def _holds_blocks(rows: Rows, columns: Sequence[str]) -> bool:
    return any(
        isinstance(block, Mapping) and block.get("type") == "image"
        for row in itertools.islice(rows, _FIRST)
        if not isinstance(row, MalformedRow)
        for column in columns
        if isinstance(row.get(column), list)
        for message in row[column]
        if isinstance(message, Mapping) and isinstance(message.get("content"), list)
        for block in message["content"]
    )


def copy_processor(source: str, folder: str) -> None:
    """Copies the files of an image processor beside a checkpoint, for transformers' AutoProcessor."""
    for file in _FILES:
        if os.path.exists(os.path.join(source, file)):
            shutil.copyfile(os.path.join(source, file), os.path.join(folder, file))


def encoded(rows: Rows) -> Rows:
    """The same rows with images of a datasets.Dataset as they are stored, not decoded."""
    features = getattr(rows.table, "features", None)
    if features is None:
        return rows
    import datasets

    table = rows.table
    for name in set(COLUMNS) & set(rows.column_names):
        stored = datasets.Image(decode=False)
        if isinstance(features[name], datasets.Image):
            table = table.cast_column(name, stored)
        elif isinstance(getattr(features[name], "feature", None), datasets.Image):
            table = table.cast_column(name, datasets.List(stored))
    return dataclasses.replace(rows, table=table)


@dataclasses.dataclass(frozen=True)
class ImageRow:
    """A row's conversations with their images.

    Attributes:
      messages: by column; contents are lists of blocks {"type": "text", "text"} and {"type": "image"}.
      sources: of the blocks of type 'image', in order.
    """

    messages: dict[str, chat.Conversation]
    sources: tuple[ImageSource, ...]


def read_row(
    row: Any,
    columns: Sequence[str],
    processor: ImageProcessor,
    folder: str | None,
    fault: Callable[[Mapping[str, Any]], str | None],
) -> ImageRow:
    """The conversations and images of a row.

    As in TRL, images of the row's column fill its blocks of type 'image' that have no image; if the first message of
    the user is text, they are put before it.

    Args:
      columns: of its conversations, in the order of the text.
      folder: of the data file, which paths of images may be relative to.
      fault: why the row, with each block as text, is not a conversation of the requested kind; None if it is.

    Raises:
      ImageError: says what is wrong.
    """
    if isinstance(row, MalformedRow):
        raise ImageError(str(row))
    column = next((name for name in COLUMNS if name in row), None)
    images = row.get(column) if column else None
    if column == "image":
        images = [] if images is None else [images]
    elif images is not None and not isinstance(images, list | tuple):
        raise ImageError(
            f"'images' is {type_with_article(images)}, not a list; a column of one image is called 'image'"
        )
    present = [name for name in columns if name in row]
    plain = {name: _flattened(row[name]) if isinstance(row[name], list) else row[name] for name in present}
    if (reason := fault(plain)) is not None:
        raise ImageError(reason)
    waiting, sources = list(images or ()), []
    messages: dict[str, chat.Conversation] = {name: [] for name in columns}
    placed = False
    for name in columns:
        for number, message in enumerate(row[name], 1):
            where = f"{name!r}, message {number}"
            if message["role"] not in _ROLES:
                raise ImageError(f"{where}: role {message['role']!r} beside images must be one of {', '.join(_ROLES)}")
            content = message.get("content")
            if content is None:  # a message that calls tools
                messages[name].append(dict(message))
                continue
            if isinstance(content, str):
                first = message["role"] == "user" and not placed
                blocks = [{"type": "image"}] * (len(images or ()) if first else 0)
                content, placed = [*blocks, {"type": "text", "text": content}], placed or first
            taken = [_block(block, waiting, sources, processor, folder, where) for block in content]
            messages[name].append({**message, "content": taken})
    if waiting:
        raise ImageError(
            f"{column!r} has {len(images)} images, but the conversation has places for {len(images) - len(waiting)}: "
            "give a block {'type': 'image'} for each, or text as the first message of the user"
        )
    return ImageRow(messages, tuple(sources))


def _flattened(messages: list[Any]) -> list[Any]:
    """Messages with blocks as text, so that they can be checked as conversations of text."""

    def text(content: Any) -> Any:
        if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
            return content
        return "".join("image" if block.get("type") == "image" else str(block.get("text")) for block in content)

    return [
        {**message, "content": text(message["content"])}
        if isinstance(message, Mapping) and "content" in message
        else message
        for message in messages
    ]


def _block(
    block: Mapping[str, Any],
    waiting: list[Any],
    sources: list[ImageSource],
    processor: ImageProcessor,
    folder: str | None,
    where: str,
) -> dict[str, Any]:
    """A block of a message as the chat template reads it; its image is appended to `sources`."""
    kind = block.get("type")
    if kind == "text":
        text = block.get("text")
        if not isinstance(text, str):
            raise ImageError(f"{where}: a block of type 'text' has {type_with_article(text)} as 'text'")
        if processor.image_token in text:
            raise ImageError(
                f"{where}: the text holds {processor.image_token}, the placeholder of images; give blocks "
                "{'type': 'image'} in its place"
            )
        return {"type": "text", "text": text}
    if kind != "image":
        raise ImageError(f"{where}: a block of type {kind!r} is not supported; supported: text, image")
    value = next((block[name] for name in ("image", "path", "url") if block.get(name) is not None), None)
    if value is None:
        if not waiting:
            raise ImageError(f"{where}: there is no image for a block of type 'image': the column has too few")
        value = waiting.pop(0)
    try:
        sources.append(image_source(value, folder))
    except ImageError as error:
        raise ImageError(f"image {len(sources) + 1}: {error}") from None
    return {"type": "image"}


@dataclasses.dataclass(frozen=True)
class DataImages:
    """The images of a data set's rows.

    Attributes:
      processor: of the model.
      sources: of each row.
      tiles: I, of the row with the most.
      column: that reward functions get them by; None: they stand in the conversations alone.
    """

    processor: ImageProcessor
    sources: Sequence[tuple[ImageSource, ...]]
    tiles: int
    column: str | None

    def batch(self, rows: Sequence[int]) -> Images:
        """Of rows [H], the same shape for all batches, so that each program compiles once."""
        return self.processor.batch([self.sources[row] for row in rows], max(self.tiles, 1))

    def read(self, row: int) -> list[Any]:
        """The PIL images of a row."""
        return [source.read() for source in self.sources[row]]

    def filled(self, row: int, messages: chat.Conversation) -> chat.Conversation:
        """A row's messages with the PIL image in each block of type 'image'."""
        images = iter(self.read(row))

        def fill(block: dict[str, Any]) -> dict[str, Any]:
            return {**block, "image": next(images)} if block["type"] == "image" else dict(block)

        return [
            {**message, "content": [fill(block) for block in message["content"]]} if message.get("content") else message
            for message in messages
        ]

    def update(self, digest: Any) -> None:
        """Adds all images to a hash."""
        for sources in self.sources:
            digest.update(str(len(sources)).encode())
            for source in sources:
                digest.update(source.digest)

    def thumbnails(self, row: int) -> list[str]:
        """The images of a row as data addresses of PNGs of at most THUMBNAIL pixels a side."""
        out = []
        for image in self.read(row):
            small, buffer = image.convert("RGB"), io.BytesIO()
            small.thumbnail((THUMBNAIL, THUMBNAIL))
            small.save(buffer, "PNG")
            out.append("data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode())
        return out

    def columns(self, rows: Sequence[int]) -> dict[str, list[Any]]:
        """The column of images for reward functions: PIL images in a list a row, or one a row."""
        if self.column is None:
            return {}
        read = functools.lru_cache(maxsize=None)(self.read)
        if self.column == "image":
            return {"image": [next(iter(read(row)), None) for row in rows]}
        return {self.column: [list(read(row)) for row in rows]}


COUNTS: dict[str, Kind] = {"images": "int", "tiles": "int"}
"""What an encoder counts of each row with images."""


def image_note(tokenized: Tokenized) -> str:
    """A remark for the report."""
    counts = tokenized.numbers("images")
    if not counts.size:
        return ""
    return f"{counts.sum()} images, {counts.min()} to {counts.max()} a row; rows that are too long are dropped"


@dataclasses.dataclass(frozen=True)
class RowReader:
    """Reads the conversations and images of a data set's rows; the attributes are arguments of `read_row`."""

    columns: tuple[str, ...]
    processor: ImageProcessor
    folder: str | None
    fault: Callable[[Mapping[str, Any]], str | None]

    def read(self, row: Any) -> ImageRow:
        """As `read_row`."""
        return read_row(row, self.columns, self.processor, self.folder, self.fault)

    def images(self, tokenized: Tokenized, column: str | None) -> DataImages:
        """The images of the rows that are kept, which are read when they are needed; `column` as `DataImages`."""
        table, row_indices = tokenized.rows.table, tokenized.usable_rows
        sources = Lazy(len(row_indices), lambda index: self.read(table[int(row_indices[index])]).sources)
        return DataImages(self.processor, sources, int(tokenized.numbers("tiles").max()), column)


class ImageEncoder:
    """What `tokenized.Encoder`s of rows with images share. Images are read at each start: their files may change under
    the names that rows have, so tokens are not cached."""

    reader: RowReader

    def identity(self) -> None:
        """As `tokenized.Encoder.identity`."""

    def _with_images(self, row: Any, read: ImageRow) -> tuple[dict[str, Any] | None, int]:
        """(columns of a row, or None for one that is too long; its tiles)"""
        raise NotImplementedError

    def _encoded(self, row: Any) -> Encoded:
        try:
            read = self.reader.read(row)
            columns, tiles = self._with_images(row, read)
        except (ImageError, chat.ChatTemplateError) as error:
            return str(error)
        return None if columns is None else {**columns, "images": len(read.sources), "tiles": tiles}

    def fault(self, row: Any) -> str | None:
        """As `tokenized.Encoder.fault`."""
        encoded = self._encoded(row)
        return encoded if isinstance(encoded, str) else None

    def encode(self, rows: list[Any]) -> list[Encoded]:
        """As `tokenized.Encoder.encode`."""
        return [self._encoded(row) for row in rows]


def data_folder(rows: Rows) -> str | None:
    """The folder of a data file; None for data from elsewhere."""
    if os.path.isfile(rows.name):
        return os.path.dirname(storage.absolute(rows.name))
    return storage.absolute(rows.name) if os.path.isdir(rows.name) else None
