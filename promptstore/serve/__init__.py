"""mlx_lm.server on a store."""

from promptstore.serve.host import Settings, serve

__all__ = ["Settings", "serve"]
