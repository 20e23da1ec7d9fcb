"""CreatedModels: serves the models of a ModelDirectory besides the models of the command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from cpuserve.api.errors.http_errors import Forbidden
from cpuserve.api.ollama.conversation import chat_messages
from cpuserve.api.ollama.parameters import sampling_of
from cpuserve.base.errors import InvalidRequest, NotFound, RequestError, StartupError
from cpuserve.base.log import get_logger
from cpuserve.serving.callers.slots import TurnSlots
from cpuserve.serving.models.preset import Preset

if TYPE_CHECKING:
    from cpuserve.api.ollama.created.directory import ModelDirectory
    from cpuserve.api.ollama.created.manifest import Manifest
    from cpuserve.api.request.state import ServerState
    from cpuserve.serving.models.loaders import Loader
from cpuserve.serving.models.registry import ModelRegistry
from cpuserve.serving.threads import run_waiting

log = get_logger("serve")


class MakeLoader(Protocol):
    """Makes a Loader for a created model that needs an engine of its own."""

    def __call__(
        self, name: str, model: str, adapter: str | None, quantization: str | None
    ) -> Loader:
        """Return a Loader. model, quantization: as the options. adapter: the path of an adapter."""


class CreatedModels:
    """Serves, creates and deletes the models that clients created or pulled."""

    def __init__(
        self,
        directory: ModelDirectory,
        models: ModelRegistry,
        make_loader: MakeLoader,
        sources: Mapping[str, str],
    ) -> None:
        """sources: the value of --model for each model of the command line, by its served name."""
        self.directory = directory
        self.sources = sources
        self.pulling = TurnSlots(2)  # a single caller has one
        self._models = models
        self._make_loader = make_loader
        for found in list(directory.manifests.values()):
            try:
                self._check_new(found.name)
                self._serve(found)
            except RequestError as error:
                log.error("the created model %s is not served: %s", found.name, error.message)

    def find(self, name: str) -> Manifest | None:
        """Return the manifest of a created model; None if there is no such model."""
        return self.directory.manifests.get(name)

    def check_name(self, name: str, owner: str, param: str = "model") -> None:
        """Raise an error if `owner` cannot create a model with this name.

        Raises:
          InvalidRequest: the name belongs to the server's start, or there is no room.
          Forbidden: another API key has a model of this name.
        """
        self._check_new(name, param)
        self._check_owner(name, owner, param)
        self.directory.check_room(name, owner)

    def _check_owner(self, name: str, owner: str, param: str = "model") -> None:
        if not self.directory.may_change(name, owner):
            msg = f"{param} {name!r} belongs to another API key: choose another name"
            raise Forbidden(msg, param=param, code="not_owner")

    def _check_new(self, name: str, param: str = "model") -> None:
        if name in self._models.names and not self._models.is_created(name):
            msg = f"{param} {name!r} is the name of a model of the server's start: choose another"
            raise InvalidRequest(msg, param=param)

    async def create(self, made: Manifest) -> None:
        """Check a new model, save its manifest and serve it; replace a created model of its name.

        Raises:
          InvalidRequest: its files are not a model, or its adapter does not fit the model;
            or the number of models is at its limit.
          NotFound: a file has not been sent.
          Forbidden: another API key has created a model of this name in the meantime.
          DiskError: the manifest cannot be written.
        """
        with self.directory.creating(made):
            if made.files or made.adapters or made.quantization:
                await run_waiting(lambda: self._check_files(made))
            preset = preset_of(made)
            self._check_owner(made.name, made.owner)
            self.directory.save(made)
            self._serve(made, preset)

    async def copy(self, source: Manifest, name: str, owner: str) -> None:
        """Serve a copy of a created model under another name, for another owner."""
        import msgspec

        await self.create(msgspec.structs.replace(source, name=name, owner=owner))

    def delete(self, name: str, owner: str) -> None:
        """Delete a created model; running requests to it may finish.

        Raises:
          NotFound: there is no such model.
          Forbidden: it is the model of another API key.
          InvalidRequest: the model comes from the command line of the server.
          DiskError: the directory cannot be written; the model is still served.
        """
        found = self.directory.manifests.get(name)
        if found is None:
            self._check_start(name)
            msg = f"model {name[:200]!r} was not found: /api/tags lists the models"
            raise NotFound(msg, code="model_not_found")
        self._check_owner(name, owner)
        self.directory.remove(name)
        if self._models.is_created(name):
            self._models.drop(name)

    def _check_start(self, name: str) -> None:
        if name in self._models.names:
            msg = (
                f"model {name!r} is served from the server's start and cannot be deleted: start "
                "the server without it"
            )
            raise InvalidRequest(msg, param="model")

    def _serve(self, made: Manifest, preset: Preset | None = None) -> None:
        preset = preset or preset_of(made)
        own = made.adapters or made.quantization
        if made.base and not own and made.base in self._models.names:
            self._models.create(made.name, preset, made.base)
            return
        adapter = self._adapter(made)
        loader = self._make_loader(made.name, self._weights(made), adapter, made.quantization)
        self._models.create_with(made.name, preset, loader, made.engine)

    def _weights(self, made: Manifest) -> str:
        return str(self.directory.folder(made.files)) if made.files else made.model

    def _adapter(self, made: Manifest) -> str | None:
        if not made.adapters:
            return None
        folder = self.directory.folder(made.adapters)
        gguf = [name for name in made.adapters if name.endswith(".gguf")]
        return str(folder / gguf[0] if gguf else folder)

    def _check_files(self, made: Manifest) -> None:
        """Read the headers of a model's files; InvalidRequest if they do not fit together."""
        from cpuserve.config.options import EngineOptions
        from cpuserve.prepare import find, model_facts

        adapter = self._adapter(made)
        options = EngineOptions(
            model=self._weights(made),
            lora_modules=None if adapter is None else [f"adapter={adapter}"],
        )
        try:
            path = find(options)
            _, facts = model_facts(options, path)
        except StartupError as error:
            raise InvalidRequest(self._public(str(error), made)) from None
        if made.quantization and facts.quantization is not None:
            msg = (
                f"quantize is not possible, because the weights are {facts.quantization} already: "
                "omit it"
            )
            raise InvalidRequest(msg, param="quantize")

    def _public(self, text: str, made: Manifest) -> str:
        """Return an error text without the file paths of this server."""
        for files in (made.files, made.adapters):
            if files:
                folder = self.directory.folder(files)
                text = text.replace(f"{folder}/", "").replace(str(folder), "the files")
        if made.model and Path(made.model).is_absolute():
            text = text.replace(made.model, made.parent or made.base)
        return text


def preset_of(made: Manifest) -> Preset:
    """Return the preset of a manifest; InvalidRequest if one of its values is invalid."""
    return Preset(
        made.system,
        chat_messages(made.messages),
        sampling_of(made.parameters),
        made.template,
        made.created,
    )


def created_models(state: ServerState) -> CreatedModels:
    """Return the models that clients created; NotFound if the server has no --models-dir."""
    if state.created is None:
        msg = (
            "This server keeps no models of clients: models are served from the start, see "
            "--models, or start it with --models-dir DIR"
        )
        raise NotFound(msg, code="models_disabled")
    created: CreatedModels = state.created
    return created
