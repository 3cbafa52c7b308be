"""How each kind of cache layer is taken apart and put together again."""

from promptstore.codecs.cache import (
    clone,
    copy_state,
    cut,
    describe,
    fits,
    leaves_of,
    lengths,
    misfit,
    n_cached,
    rebuild,
    take_apart,
    unknown_classes,
)
from promptstore.codecs.codec import Codec, LayerKind, Leaf
from promptstore.codecs.table import codec_by_tag, codec_of, has_tag

__all__ = [
    "Codec",
    "LayerKind",
    "Leaf",
    "clone",
    "codec_by_tag",
    "codec_of",
    "copy_state",
    "cut",
    "describe",
    "fits",
    "has_tag",
    "leaves_of",
    "lengths",
    "misfit",
    "n_cached",
    "rebuild",
    "take_apart",
    "unknown_classes",
]
