"""The methods of `LLM` that make the requests of a call and run them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cpuserve.llm_arguments import PromptInput, Tokenization, text_and_ids
from cpuserve.offline.adapters import AdapterMethods
from cpuserve.offline.control import ControlMethods
from cpuserve.offline.jobs import UseTqdm, progress
from cpuserve.outputs import RequestOutput
from cpuserve.serving.generation.batch import BatchItem, run_batch

if TYPE_CHECKING:
    from cpuserve.serving.calls.events import Choice
    from cpuserve.serving.models.context import ModelContext
    from cpuserve.tokenizer.cut import Cut
    from cpuserve.tokenizer.tokenizer import Tokenizer


class RequestMethods(AdapterMethods, ControlMethods):
    """The methods of LLM that make requests and run them."""

    _tokenizer: Tokenizer
    _num_requests: int

    def _run(
        self,
        items: list[BatchItem],
        use_tqdm: UseTqdm,
        context: ModelContext,
        keep: Callable[[int, Choice], None] | None = None,
    ) -> None:
        """Run all items until their sequences have ended; raises RequestError and EngineDead.

        keep(position of the item, choice) is called when a sequence has ended, while others run.
        """
        self._check_awake()
        with progress(sum(len(item.sequences) for item in items), use_tqdm) as advance:

            def ended(position: int, choice: Choice) -> None:
                if keep is not None:
                    keep(position, choice)
                advance(1)

            run_batch(self._client, context, items, ended)

    def _request(
        self,
        prompt: PromptInput,
        before: str = "",
        how: Tokenization | None = None,
        cut: Cut | None = None,
    ) -> RequestOutput:
        """Return an empty RequestOutput for a prompt. before: the text to put before the prompt.

        cut: the tokens that are kept; of a text, special tokens are kept as well.
        """
        how = how or Tokenization()
        text, ids = text_and_ids(prompt)
        most, left = cut or (None, False)
        if ids is None:
            whole = before + (text or "")
            whole = whole.lower() if how.lower else whole
            ids = self._tokenizer.encode(whole, how.special, most=most, left=left)
        elif cut is not None:
            ids = cut.apply(ids)
        self._num_requests += 1
        return RequestOutput(str(self._num_requests - 1), text, ids)
