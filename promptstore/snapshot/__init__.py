"""One snapshot file: write it, read rows of it, verify it.

Knows bytes and descriptions, not caches and not the index. A file is plain
safetensors: the rows lie in chunks of 256 tokens, all layers of a band contiguous,
so that a prefix of the tokens is a prefix of the band; state and token ids come last.
The header is padded with spaces so that the rows start on a page.

::

    8 bytes   header length, little-endian
    header    JSON, spaces up to a multiple of 4096
    chunk 0   rows [start, start + 256) of layer 0 part 0, of layer 0 part 1, …
    chunk 1   …
    state     the arrays of recurrent layers
    tokens    int64, little-endian
"""

from promptstore.snapshot.header import (
    CHECKSUM_BYTES,
    Claims,
    Contents,
    Written,
    nbytes_of,
)
from promptstore.snapshot.pages import left_as_found
from promptstore.snapshot.read import (
    SnapshotFile,
    Stamp,
    header_checksum,
    read_contents,
    require_plausible,
    stamp_at,
)
from promptstore.snapshot.rows import Placed, Rows, copy_rows
from promptstore.snapshot.write import Body, claim, create, is_abandoned, write

__all__ = [
    "CHECKSUM_BYTES",
    "Body",
    "Claims",
    "Contents",
    "Placed",
    "Rows",
    "SnapshotFile",
    "Stamp",
    "Written",
    "claim",
    "copy_rows",
    "create",
    "header_checksum",
    "is_abandoned",
    "left_as_found",
    "nbytes_of",
    "read_contents",
    "require_plausible",
    "stamp_at",
    "write",
]
