"""POST /api/create: make a model from another model, or from files sent to /api/blobs."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Response

from cpuserve.api.ollama.created.directory import MOST_FILES
from cpuserve.api.ollama.created.manifest import Manifest, checked_digest, checked_name
from cpuserve.api.ollama.created.modelfile import ROLES, read_modelfile
from cpuserve.api.ollama.created.store import CreatedModels, created_models
from cpuserve.api.ollama.errors import OLLAMA
from cpuserve.api.ollama.go_template import is_go_template, to_jinja
from cpuserve.api.ollama.parameters import sampling_of
from cpuserve.api.ollama.progress import DONE, OllamaProgress, Steps, progress_response
from cpuserve.api.ollama.pull import create_downloaded
from cpuserve.api.request.context import RequestContext
from cpuserve.api.request.fields import is_set
from cpuserve.api.response.openapi import LINES
from cpuserve.api.route import post
from cpuserve.base.errors import InvalidRequest, NotFound
from cpuserve.base.log import get_logger
from cpuserve.loader.hub import has_model_form
from cpuserve.platforms.formats import MADE_WHILE_LOADING
from cpuserve.serving.calls.call import unsupported
from cpuserve.serving.threads import run_rendering, run_sized
from cpuserve.tokenizer.chat import MAX_TEMPLATE_CHARS, check_template

log = get_logger("serve")
router = APIRouter()
_FILE = re.compile(r"(?=.{1,200}$)\w[\w.-]*\.(gguf|safetensors|json|jinja|txt|model)")
# Fields of newer Ollama versions that would change the responses of a model.
_REFUSED = ("renderer", "parser", "remote_host", "draft", "draft_files", "path")
_GGUF = "model.gguf"


class OllamaCreate(msgspec.Struct, kw_only=True):
    """The body of POST /api/create. Older clients send `name` for `model`, and a `modelfile`.

    from: the existing model that the new model is based on.
    files, adapters: the digest of each file that was sent to /api/blobs, by file name.
    quantize: a quantization format, as in --quantization.
    """

    model: str | None = None
    name: str | None = None
    from_: str | None = msgspec.field(name="from", default=None)
    files: dict[str, str] | None = None
    adapters: dict[str, str] | None = None
    template: str | None = None
    license: str | list[str] | None = None
    system: str | None = None
    parameters: dict[str, Any] | None = None
    messages: list[dict[str, Any]] | None = None
    quantize: str | None = None
    quantization: str | None = None
    modelfile: str | None = None
    stream: bool | None = None
    path: Any = None
    renderer: Any = None
    parser: Any = None
    remote_host: Any = None
    draft: Any = None
    draft_files: Any = None


@post(
    router,
    "/api/create",
    schema=OllamaCreate,
    response=OllamaProgress,
    dialect=OLLAMA,
    id_prefix="ollama-",
    stream=LINES,
    pages=False,
)
async def create(request: RequestContext, body: OllamaCreate) -> Response:
    """Make a model from another model or from files, and serve it under its name."""
    name = checked_name(body.model or body.name)
    request.note_model(name)
    created = created_models(request.state)
    for field in _REFUSED:
        if is_set(getattr(body, field)):
            msg = f"{field} is not supported: omit it"
            raise unsupported(msg, field)
    created.check_name(name, request.owner)
    if body.modelfile:
        text, given = body.modelfile, body
        body = await run_sized(len(text), lambda: _with_modelfile(given, text))
    made = await _manifest(created, request, name, body)
    steps = _create(created, made)
    return progress_response(request, steps, stream=body.stream is not False)


async def _create(created: CreatedModels, made: Manifest) -> Steps:
    if made.model and not made.base and created.find(made.parent) is None:
        async with aclosing(create_downloaded(created, made)) as steps:
            async for step in steps:
                yield step
    else:
        await created.create(made)
        yield OllamaProgress("using existing layer")
        yield OllamaProgress("writing manifest")
    log.info("model %s was created from %s, as a client asked", made.name, made.parent or "files")
    yield DONE


async def _manifest(
    created: CreatedModels, request: RequestContext, name: str, body: OllamaCreate
) -> Manifest:
    """Return the manifest of the model to create; its weights may still need a download.

    Raises:
      InvalidRequest: a field is invalid.
      NotFound: the model in the field `from` does not exist.
    """
    files, adapters = _files("files", body.files), _files("adapters", body.adapters)
    if bool(body.from_) == bool(files):
        msg = "from or files must be sent, and not both: name a model, or its files"
        raise InvalidRequest(msg, param="from")
    made = _beginning(created, request, body.from_ or "", files)
    made.name, made.owner, made.created = name, request.owner, int(time.time())
    if adapters:
        if made.adapters:
            msg = f"adapters is not possible, because {made.parent} has an adapter: omit it"
            raise InvalidRequest(msg, param="adapters")
        made.adapters = adapters
    if quantize := (body.quantize or body.quantization):
        made.quantization = _checked_quantize(quantize)
    if body.system is not None:
        made.system = body.system
    if body.template:
        made.template = await _checked_template(body.template)
    if body.parameters:
        sampling_of(body.parameters)
        made.parameters = {**made.parameters, **body.parameters}
    if body.messages is not None:
        _check_messages(body.messages)
        made.messages = body.messages
    if body.license:
        made.license = [body.license] if isinstance(body.license, str) else body.license
    return made


def _beginning(
    created: CreatedModels, request: RequestContext, source: str, files: dict[str, str]
) -> Manifest:
    """Return a manifest without name, for the model in `from` or for the files."""
    if files:
        return Manifest(name="", files=files)
    known = checked_name(source, "from")
    if (parent := created.find(known)) is not None:
        return msgspec.structs.replace(parent, parent=known)
    if known in request.models.names:
        if request.models.parent(known) is None:
            return Manifest(name="", base=known, model=created.sources.get(known, ""), parent=known)
        return Manifest(name="", base=known, parent=known)
    if not has_model_form(known):
        msg = (
            f"from {source[:80]!r} does not exist: name a served model (see /api/tags), a model of "
            "the Hugging Face hub (owner/name), or send files"
        )
        raise NotFound(msg, param="from", code="model_not_found")
    return Manifest(name="", model=known, parent=known)


def _check_messages(messages: list[dict[str, Any]]) -> None:
    """Raise InvalidRequest unless each message has a role and a text as its content."""
    for index, message in enumerate(messages):
        further = [name for name, value in message.items() if is_set(value)]
        if others := sorted({*further} - {"role", "content"}):
            msg = f"messages[{index}].{others[0][:80]} is not supported: send role and content"
            raise unsupported(msg, "messages")
        if message.get("role") not in ROLES or not isinstance(message.get("content"), str):
            msg = f"messages[{index}] must have a role ({', '.join(ROLES)}) and a text as content"
            raise InvalidRequest(msg, param="messages")


def _files(param: str, given: Mapping[str, str] | None) -> dict[str, str]:
    """Return the SHA-256 of each file by its name; a name is checked to be a safe file name."""
    if given and len(given) > MOST_FILES:
        msg = f"{param} has {len(given)} files: at most {MOST_FILES} are allowed"
        raise InvalidRequest(msg, param=param)
    found = {}
    for name, digest in (given or {}).items():
        if _FILE.fullmatch(name) is None or ".." in name:
            msg = (
                f"{param}: {name[:80]!r} is no name of a file of a model: send .gguf or "
                ".safetensors with its .json files, without folders"
            )
            raise InvalidRequest(msg, param=param)
        found[name] = checked_digest(digest, f"{param}: {name}")
    return found


def _checked_quantize(quantize: str) -> str:
    if quantize.lower() not in MADE_WHILE_LOADING:
        msg = (
            f"quantize {quantize[:40]!r} is not supported: send one of "
            f"{', '.join(MADE_WHILE_LOADING)}, or files that are quantized already"
        )
        raise unsupported(msg, "quantize")
    return quantize.lower()


async def _checked_template(source: str) -> str:
    """Return the template as Jinja; InvalidRequest if this server cannot render it."""
    if len(source) <= MAX_TEMPLATE_CHARS and is_go_template(source):
        text = source
        source = await run_rendering(len(text), lambda: to_jinja(text))
    try:
        await run_rendering(len(source), lambda: check_template(source))
    except InvalidRequest as error:
        msg = f"template: {error.message}"
        raise InvalidRequest(msg, param="template") from None
    return source


def _with_modelfile(body: OllamaCreate, text: str) -> OllamaCreate:
    """Return the request with the fields of its Modelfile; its own fields take precedence."""
    found = read_modelfile(text)
    source, files = found["from"], {}
    if digest := _sent(source, "FROM"):
        source, files = None, {_GGUF: digest}
    adapters = {}
    for number, given in enumerate(found["adapters"]):
        if (digest := _sent(given, "ADAPTER")) is None:
            error = _by_path("ADAPTER", given)
            raise error
        adapters[f"adapter{number or ''}.gguf"] = digest
    return msgspec.structs.replace(
        body,
        from_=body.from_ or source,
        files=body.files or files,
        adapters=body.adapters or adapters,
        system=found.get("system") if body.system is None else body.system,
        template=body.template or found.get("template"),
        parameters={**found["parameters"], **(body.parameters or {})},
        messages=body.messages or found["messages"] or None,
        license=body.license or found["license"],
    )


def _sent(given: str, instruction: str) -> str | None:
    """Return the digest of a blob that a Modelfile instruction refers to; None for a model name."""
    if given.startswith("@"):
        return given[1:]
    if given.startswith((".", "/", "~")) or given.endswith((".gguf", ".safetensors", ".bin")):
        raise _by_path(instruction, given)
    return None


def _by_path(instruction: str, given: str) -> InvalidRequest:
    msg = (
        f"modelfile: {instruction} {given[:80]!r} is a path, and the server reads no files of its "
        "disk: send the file to /api/blobs, then its digest in files or adapters"
    )
    return InvalidRequest(msg, param="modelfile")
