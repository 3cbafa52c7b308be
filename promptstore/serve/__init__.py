"""mlx_lm.server on a store."""

from promptstore.serve.host import Settings, serve
from promptstore.serve.upstream import ServerMoved

__all__ = ["ServerMoved", "Settings", "serve"]
