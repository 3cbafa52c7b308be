"""mlx_lm.server's models, each with what the store must know of it."""

from __future__ import annotations

import contextlib
import logging
import uuid
from pathlib import Path
from typing import Any

from mlx_lm import server
from mlx_lm.models.cache import make_prompt_cache

from promptstore.errors import ModelUnreadable
from promptstore.mlx_lm.lru import ModelFiles, files_of
from promptstore.probe import BatchedPath, batched_path, n_vocabulary
from promptstore.types import Namespace

_log = logging.getLogger("promptstore")


class Provider(server.ModelProvider):
    """Loads models as the server does, and says whose KV theirs is.

    Attributes:
        namespace: Of the loaded model.
        is_identified: Whether it is that of the model's files. If they cannot be read,
            or changed while they were read, or this is one of several ranks, this load
            has a namespace of its own.
        batched: What the batched path leaves in a cache of the loaded model.
        n_vocabulary: How many ids the loaded model knows; 0 if it does not tell.
    """

    namespace = Namespace("nothing loaded")
    is_identified = False
    batched = BatchedPath(alone=False, shared=False)
    n_vocabulary = 0

    def _load(self, *key: Any, **more: Any) -> None:
        # Whatever fails from here on: nothing may be taken for the old model's KV,
        # and the next request must load again.
        self._is_of_its_own()
        try:
            files = self._files(key)
            upstream: Any = super()
            upstream._load(*key, **more)
            if files is None and not Path(key[0]).is_dir():
                # The hub's files may have come with the loading just now.
                files = self._files(self.model_key)
            found = _unchanged(files)
            if found is None and not self.is_distributed:
                _log.warning("%s cannot be identified: its KV stays in memory", key[0])
            if found is not None:
                self.namespace, self.is_identified = found, True
            with contextlib.suppress(Exception):  # the model's own; requests will tell
                self.n_vocabulary = n_vocabulary(self.model)
            if self.is_batchable:
                self._probe()
        except BaseException:
            self.reset()
            raise

    def _files(self, key: Any) -> ModelFiles | None:
        """Return the files of a model; a rank has a part of it, often of them too."""
        return None if self.is_distributed else files_of(tuple(key))

    @property
    def n_target(self) -> int | None:
        """Where a draft model's layers begin in a cache, if there is one."""
        if self.draft_model is None:
            return None
        return len(make_prompt_cache(self.model))

    def trusts(self, *, shared: bool) -> bool:
        """Whether a cache that comes out of a batch holds what the single path leaves.

        Args:
            shared: Whether others were in the batch as well.
        """
        return self.batched.shared if shared else self.batched.alone

    def _is_of_its_own(self) -> None:
        """Give what is loaded a namespace that nothing else has."""
        self.namespace = Namespace(f"in memory, {uuid.uuid4()}")
        self.is_identified = False
        self.batched = BatchedPath(alone=False, shared=False)
        self.n_vocabulary = 0

    def _probe(self) -> None:
        try:
            self.batched = batched_path(self.model)
        except Exception:  # the model's own; requests will tell
            _log.exception("what batches leave of this model cannot be found out")
            return
        if self.batched.error:
            _log.warning(
                "this model cannot be batched (%s): requests are served one at a time",
                self.batched.error,
            )
            self.is_batchable = False
        elif not self.batched.shared:
            _log.warning(
                "mlx-lm's batched prefill leaves another state of this model than the "
                "single one: what shared a batch is not stored"
            )


def _unchanged(files: ModelFiles | None) -> Namespace | None:
    """Return what the files are, unless they were something else before."""
    if files is None:
        return None
    try:
        return files.namespace if files.identify() == files.namespace else None
    except ModelUnreadable:
        return None
