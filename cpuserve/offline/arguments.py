"""The arguments of `LLM`: prompts, conversations and parameters in each type that it accepts.

METHODS and NEUTRAL list the parts of the offline API of vLLM that `LLM` refuses.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from cpuserve.base.errors import InvalidRequest
from cpuserve.media.sources import SourceRules, read_source
from cpuserve.sampling.params import SamplingParams
from cpuserve.sampling.pooling import PoolingParams
from cpuserve.tokenizer.conversation import MediaPart, is_data_url

PromptInput = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]
_CHANNELS = (1, 3, 4)
Params = TypeVar("Params", SamplingParams, PoolingParams)
CONTENT_FORMATS = ("auto", "string", "openai")
_MEMBERS = {"prompt", "prompt_token_ids", "cache_salt"}
# The types of parts that are no text, and the members that may have their data.
_MEDIA: dict[str, tuple[str, ...]] = {
    "image": ("image", "url", "path"),
    "image_pil": ("image_pil",),
    "image_url": ("image_url",),
    "input_image": ("image_url",),
    "file": ("file",),
    "input_file": ("file_data", "file_url"),
}
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
# Modes that no file has: premultiplied alpha, and hues.
_NO_FILE_MODES = {"La": "LA", "RGBa": "RGBA", "HSV": "RGB"}
# The arguments of tokenization_kwargs, and the values of those that must have one of a few.
_TOKENIZATION: dict[str, tuple[object, ...] | None] = {
    "truncate_prompt_tokens": None,
    "truncation_side": None,
    "add_special_tokens": None,
    "do_lower_case": None,
    "max_length": None,
    "truncation": (None, True, False, "longest_first", "do_not_truncate"),
    "padding": (None, False, "do_not_pad"),
    "pad_prompt_tokens": (None,),
    "needs_detokenization": (None, True, False),
    "return_token_offsets": (None, False),
}


def chosen_tool(choice: str | dict[str, Any]) -> tuple[str, str | None]:
    """Return the tool choice of a GenerateCall, and the name of the forced function, or None."""
    if isinstance(choice, str):
        return choice, None
    function = choice.get("function") if choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        msg = (
            'tool_choice must be "none", "auto", "required" or '
            '{"type": "function", "function": {"name": NAME}}'
        )
        raise InvalidRequest(msg, param="tool_choice")
    return "required", name


def as_list(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
    """Return the prompts as a list. A list of token ids is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    listed: list[Any] = list(prompts)
    if listed and all(isinstance(item, int) for item in listed):
        return [listed]
    return listed


def text_and_ids(prompt: PromptInput) -> tuple[str | None, list[int] | None]:
    """Return (text, token ids) of a prompt; one of them may be None.

    Raises:
        InvalidRequest: it is no prompt, or has a member that is not supported.
    """
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, Mapping):
        given = {name: value for name, value in prompt.items() if value is not None}
        text, ids = given.get("prompt"), given.get("prompt_token_ids")
        if text is None and ids is None:
            msg = f'a prompt has neither "prompt" nor "prompt_token_ids": {list(prompt)}'
            raise InvalidRequest(msg, param="prompts")
        if unknown := given.keys() - _MEMBERS:
            msg = f"a prompt has {', '.join(sorted(map(str, unknown)))}: only text is supported"
            raise InvalidRequest(msg, param="prompts")
        if text is not None and not isinstance(text, str):
            msg = f'"prompt" must be a text, got {type(text).__name__}'
            raise InvalidRequest(msg, param="prompts")
        return text, None if ids is None else _ids(ids)
    return None, _ids(prompt)


def without_media(
    prompt: PromptInput, where: str
) -> tuple[PromptInput, list[MediaPart], Mapping[str, Any] | None]:
    """Return a prompt without its pictures, these pictures, and its settings for them.

    where: the place of the prompt, for errors.

    Raises:
        InvalidRequest: its multi_modal_data has no pictures, or sound or video.
    """
    if not isinstance(prompt, Mapping):
        return prompt, [], None
    given = {name: value for name, value in prompt.items() if value is not None}
    data, settings = given.pop("multi_modal_data", None), given.pop("mm_processor_kwargs", None)
    # In vLLM, the ids are the keys of its cache; here pictures are known by their contents.
    ids = given.pop("multi_modal_uuids", None)
    if data is None and settings is None and ids is None:
        return prompt, [], None
    if isinstance(data, Mapping):
        data = {kind: items for kind, items in data.items() if not _is_empty(items)}
    if not data and ids is not None:
        msg = (
            f"{where} has multi_modal_uuids without multi_modal_data, and no picture is kept by a "
            "uuid: give the pictures again"
        )
        raise InvalidRequest(msg, param="prompts")
    if not isinstance(data, Mapping) or set(data) != {"image"}:
        msg = f'{where}.multi_modal_data must be {{"image": PICTURE or [PICTURE, ...]}}'
        raise InvalidRequest(msg, param="prompts")
    images = data["image"] if isinstance(data["image"], list | tuple) else [data["image"]]
    place = f"{where}.multi_modal_data.image"
    return given, [picture_part(each, f"{place}[{i}]") for i, each in enumerate(images)], settings


def refuse_pictures(prompts: Sequence[PromptInput], what: str) -> None:
    """Raise InvalidRequest if a prompt has pictures, which `what` does not keep with its tokens."""
    for prompt in prompts:
        if isinstance(prompt, Mapping) and prompt.get("multi_modal_data") is not None:
            msg = f"{what} reads no pictures, because it sends token ids only: call generate"
            raise InvalidRequest(msg, param="prompts")


def _is_empty(items: object) -> bool:
    return items is None or (isinstance(items, list | tuple) and not items)


def with_media(messages: Messages) -> list[dict[str, Any]]:
    """Return the messages of a conversation with a MediaPart for each picture and document.

    Raises:
        InvalidRequest: a picture is none of the types that picture_part accepts.
    """
    found: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list | tuple):
            where = f"messages[{index}].content"
            parts = [_part(each, f"{where}[{i}]") for i, each in enumerate(content)]
            found.append({**message, "content": parts})
        else:
            found.append(cast("dict[str, Any]", message))  # the template checks it
    return found


def _part(part: Any, where: str) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in _MEDIA:
        return part
    given = next((part[name] for name in _MEDIA[kind] if part.get(name) is not None), None)
    detail = part.get("detail")
    if isinstance(given, Mapping):
        detail = given.get("detail", detail)
        given = given.get("url", given.get("file_data"))
    found = picture_part(given, where, document=kind in ("file", "input_file"))
    return replace(found, type=kind, detail=detail if isinstance(detail, str) else None)


def picture_part(given: Any, where: str, *, document: bool = False) -> MediaPart:
    """Return a picture or a document of a program as a part of a message.

    given: an image of Pillow, an array of uint8 [height, width], [height, width, channels] or
      [channels, height, width], the bytes of a file, its path, or a URL (data:, http:, https: or
      file:, by the rules of a server).

    Raises:
        InvalidRequest: it is none of these, or the file cannot be read.
    """
    noun = "a file" if document else "an image"
    made = MediaPart(kind="file" if document else "image", type="image", noun=noun, where=where)
    if isinstance(given, str) and (is_data_url(given) or "://" in given[:16]):
        return replace(made, url=given)
    if isinstance(given, str | Path):
        path = Path(given).absolute()
        try:
            given = read_source(path.as_uri(), SourceRules(folder=str(path.parent.resolve())))
        except InvalidRequest as error:
            why = error.message if path.is_file() else "is no file"
            msg = f"{where} ({path}) {why}"
            raise InvalidRequest(msg, param="messages") from None
    elif isinstance(getattr(given, "shape", None), tuple):
        given = _png_of(given, where)
    elif callable(getattr(given, "save", None)) and hasattr(given, "mode"):
        given = _file_of(given, where)
    if not isinstance(given, bytes):
        msg = (
            f"{where} is {type(given).__name__}: a picture must be an image of Pillow, an array, "
            "bytes, a path or a URL"
        )
        raise InvalidRequest(msg, param="messages")
    return replace(made, data=b64encode(given).decode())


def _file_of(image: Any, where: str) -> bytes:
    """Return an image of Pillow as the bytes of a file, turned as its EXIF says.

    Raises InvalidRequest if its pixels cannot be read.
    """
    from PIL import ImageOps

    try:
        image = ImageOps.exif_transpose(image)
        if image.mode in _NO_FILE_MODES:
            image = image.convert(_NO_FILE_MODES[image.mode])
        file = BytesIO()
        # TIFF has the modes that PNG does not have.
        image.save(file, "PNG" if image.mode in _PNG_MODES else "TIFF")
    except (OSError, SyntaxError, ValueError) as error:
        msg = f"{where} cannot be read by Pillow: {error}"
        raise InvalidRequest(msg, param="messages") from None
    return file.getvalue()


def _png_of(array: Any, where: str) -> bytes:
    """Return an array of uint8 as the bytes of a PNG; InvalidRequest if it is no picture."""
    import numpy as np
    from PIL import Image

    pixels = np.asarray(array)
    if pixels.ndim == 3 and pixels.shape[0] in _CHANNELS and pixels.shape[2] not in _CHANNELS:
        pixels = pixels.transpose(1, 2, 0)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    shaped = pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in _CHANNELS)
    if pixels.dtype != np.uint8 or not shaped or 0 in pixels.shape:
        msg = (
            f"{where} is an array of {pixels.dtype} {list(pixels.shape)}: a picture must be one of "
            "uint8 [height, width] or [height, width, channels], with 1, 3 or 4 channels"
        )
        raise InvalidRequest(msg, param="messages")
    file = BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(file, "PNG")
    return file.getvalue()


def with_salts(
    params: list[SamplingParams], prompts: Sequence[PromptInput]
) -> list[SamplingParams]:
    """Return the parameters of each prompt with its "cache_salt", if it has one."""
    salts = [each.get("cache_salt") if isinstance(each, Mapping) else None for each in prompts]
    return [
        own if salt is None else msgspec.structs.replace(own, cache_salt=salt)
        for own, salt in zip(params, salts, strict=True)
    ]


def _ids(ids: Any) -> list[int]:
    try:
        return msgspec.convert(list(ids), list[int])
    except (TypeError, msgspec.ValidationError) as error:
        msg = f"a prompt must be text or a list of token ids: {error}"
        raise InvalidRequest(msg, param="prompts") from None


def conversations_of(messages: Messages | Sequence[Messages]) -> list[Messages]:
    """Return the conversations as a list; a list of messages is one conversation."""
    listed: list[Any] = list(messages)
    if listed and isinstance(listed[0], Mapping):
        return [listed]
    return listed


def one_each(given: Params | Sequence[Params], count: int, name: str) -> list[Params]:
    """Return the parameters of each prompt; InvalidRequest if a list has not `count` items.

    name: the name of the argument, for errors.
    """
    if isinstance(given, SamplingParams | PoolingParams):
        return [given] * count
    found = list(given)
    if len(found) != count:
        msg = f"{len(found)} {name} for {count} prompts"
        raise InvalidRequest(msg, param=name)
    return found


def priorities_of(given: int | Sequence[int] | None, count: int) -> list[int]:
    """Return the priority of each prompt; InvalidRequest if a list has not `count` items."""
    if given is None or isinstance(given, int):
        return [given or 0] * count
    if len(given) != count:
        msg = f"{len(given)} priorities for {count} prompts"
        raise InvalidRequest(msg, param="priority")
    return list(given)


@dataclass(frozen=True, slots=True)
class Tokenization:
    """How texts become tokens.

    truncate: the number of tokens that are kept; -1 = as many as fit; None = all.
    side: "left" or "right", the end of the prompt that is cut; None = the usual one.
    special: whether special tokens are added.
    lower: whether the text is written in lower case.
    """

    truncate: int | None = None
    side: str | None = None
    special: bool = True
    lower: bool = False


def tokenization_of(given: Mapping[str, Any] | None) -> Tokenization:
    """Return the settings in tokenization_kwargs.

    Raises:
        InvalidRequest: an argument or its value is not supported.
    """
    kwargs = dict(given or {})
    for name, value in kwargs.items():
        values = _TOKENIZATION.get(name, ())
        if values is not None and value not in values:
            msg = f"tokenization_kwargs: {name}={value!r} is not supported: omit it"
            raise InvalidRequest(msg, param="tokenization_kwargs")
    truncate, length = kwargs.get("truncate_prompt_tokens"), kwargs.get("max_length")
    cuts = kwargs.get("truncation") in (True, "longest_first")
    if length is not None and not cuts:
        msg = "tokenization_kwargs: max_length needs truncation=True"
        raise InvalidRequest(msg, param="tokenization_kwargs")
    if cuts:
        truncate = -1 if length is None else length
    if truncate is not None and not isinstance(truncate, int):
        msg = f"tokenization_kwargs: the number of tokens must be whole, got {truncate!r}"
        raise InvalidRequest(msg, param="tokenization_kwargs")
    special = kwargs.get("add_special_tokens", True) is not False
    return Tokenization(
        truncate, kwargs.get("truncation_side"), special, bool(kwargs.get("do_lower_case"))
    )


def check_content_format(content_format: str) -> None:
    """Raise InvalidRequest for an unknown form of content."""
    if content_format not in CONTENT_FORMATS:
        msg = (
            f"chat_template_content_format={content_format!r}: it is one of "
            f"{', '.join(CONTENT_FORMATS)}, and templates get the form that they read"
        )
        raise InvalidRequest(msg, param="chat_template_content_format")


_ENGINE = "the engine is not made of torch modules in worker processes"
_WEIGHTS = "weights are loaded from files once; make another LLM to change them"
# Attributes that the class has in vLLM only.
METHODS = {
    "apply_model": _ENGINE,
    "collective_rpc": _ENGINE,
    "finish_weight_update": _WEIGHTS,
    "get_weight_version": _WEIGHTS,
    "init_weight_transfer_engine": _WEIGHTS,
    "llm_engine": "the engine has another interface; LLM has methods for what programs need",
    "release_kv_cache_memory": "sleep() frees weights and KV cache together",
    "shutdown_weight_transfer_engine": _WEIGHTS,
    "start_draft_weight_update": _WEIGHTS,
    "start_profile": "use `cpuserve bench`, or a profiler of the system such as perf",
    "start_weight_update": _WEIGHTS,
    "stop_profile": "use `cpuserve bench`, or a profiler of the system such as perf",
    "update_weight_version": _WEIGHTS,
    "update_weights": _WEIGHTS,
}
# Options of vLLM that are refused, except for their defaults, which have no effect.
NEUTRAL: dict[str, object] = {
    "allowed_local_media_path": "",
    "enable_return_routed_experts": False,
    "return_sampling_mask": False,
    "skip_tokenizer_init": False,
    "offload_group_size": 0,
    "offload_num_in_group": 1,
    "offload_prefetch_step": 1,
}


def engine_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an LLM, except for options of vLLM that ask for nothing.

    enable_lora means allow_runtime_lora_updating: prompts may bring their adapters.
    """
    found = {
        name: value
        for name, value in options.items()
        if name not in NEUTRAL or value != NEUTRAL[name]
    }
    if found.get("enable_lora") is True:
        found.setdefault("allow_runtime_lora_updating", True)
    template = found.get("chat_template")
    if template is not None:
        found["chat_template"] = str(template)
    return found


def why_refused(name: str) -> str:
    """Return the message of the AttributeError for an attribute that LLM does not have."""
    why = METHODS.get(name)
    return f"'LLM' object has no attribute {name!r}" + (f": {why}" if why else "")
