"""How each kind of cache layer is taken apart and put together again."""

from promptstore.codecs.cache import (
    clone,
    cut,
    describe,
    fits,
    has_codecs,
    n_cached,
    part_arrays,
    rebuild,
)
from promptstore.codecs.table import Codec, codec_by_tag, codec_of

__all__ = [
    "Codec",
    "clone",
    "codec_by_tag",
    "codec_of",
    "cut",
    "describe",
    "fits",
    "has_codecs",
    "n_cached",
    "part_arrays",
    "rebuild",
]
