"""What a codec of one kind of layer must tell, and what most kinds share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import mlx.core as mx

from promptstore.buffers import dtype_name
from promptstore.layers import Layer, RowPart
from promptstore.ranges import Ranges, Run

LayerKind = Literal["full", "window", "state"]


@dataclass(frozen=True)
class Leaf:
    """A live leaf layer, taken apart.

    Args:
        arrays: Its row parts, as they are.
        runs: Where the rows of the tokens lie.
        ring: How its window lies.
        state: Its other arrays by name.
    """

    arrays: list[mx.array]
    runs: tuple[Run, ...] = ()
    ring: int | None = None
    state: dict[str, mx.array] = field(default_factory=dict)


class Codec:
    """How one kind of layer is taken apart and put together again.

    A layer of *n* tokens is rows (one a token, where they lie is told by *runs*), a
    *ring* (a number that tells how a window lay), and state (named arrays).
    """

    tag: ClassVar[str]
    """The kind and its format number, as files carry it."""
    class_name: ClassVar[str]
    module: ClassVar[str] = "mlx_lm.models.cache"
    kind: ClassVar[LayerKind]
    """Full: any position can be resumed; window: those whose window is held; state:
    only where the state was taken."""

    def length(self, layer: Any) -> int | None:
        """Return the tokens that *layer* holds, or ``None`` if it does not tell."""
        raise NotImplementedError

    def settings(self, layer: Any) -> dict[str, int]:
        """Return what the class was constructed with."""
        return {}

    def describe(self, layer: Any) -> Layer:
        """Return the description of a *layer* that holds at least one token."""
        raise NotImplementedError

    def arrays(self, layer: Any) -> list[mx.array]:
        """Return the row parts of *layer* as they are."""
        return []

    def runs(self, layer: Any, n_tokens: int) -> tuple[Run, ...]:
        """Return where the rows of tokens below *n_tokens* lie, as far as held.

        Raises:
            NotCovered: The live values contradict each other.
        """
        return ()

    def ring(self, layer: Any) -> int | None:
        """Return how the window lies, if its rows alone do not tell."""
        return None

    def state(self, layer: Any) -> dict[str, mx.array]:
        """Return the arrays that are a function of all tokens."""
        return {}

    def attach(self, layer: Any, leaf: Leaf) -> None:
        """Give a live layer the row parts and the state of *leaf* for its own."""
        raise NotImplementedError

    def cut(self, layer: Any, n_tokens: int) -> None:
        """Drop all but the first *n_tokens* of a layer of full attention."""
        raise NotImplementedError

    def needs(self, layer: Layer, n_tokens: int, ring: int | None) -> Ranges:
        """Return the tokens whose rows are needed to go on from *n_tokens*."""
        return ()

    def place(
        self, layer: Layer, n_tokens: int, room: int, ring: int | None
    ) -> tuple[int, tuple[Run, ...]]:
        """Return how many rows to allocate, and where the needed ones go."""
        return 0, ()

    def build(self, cls: type[Any], layer: Layer, n_tokens: int, leaf: Leaf) -> Any:
        """Return a live layer of *n_tokens* on the arrays of *leaf*, now its own."""
        raise NotImplementedError


class RowsCodec(Codec):
    """A layer of keys and values, one row a token."""

    part_names: ClassVar[tuple[str, ...]] = ("keys", "values")

    def describe(self, layer: Any) -> Layer:
        """Return the description of a *layer* that holds at least one token.

        Raises:
            ValueError: It holds more than one sequence.
        """
        arrays = self.arrays(layer)
        if any(array.shape[0] != 1 for array in arrays):
            raise ValueError(
                f"a {self.class_name} of {arrays[0].shape[0]} sequences cannot be "
                "stored; extract one sequence from the batch first"
            )
        parts = (
            RowPart(name, array.shape[1], array.shape[3], dtype_name(array))
            for name, array in zip(self.part_names, arrays, strict=True)
        )
        return Layer(self.tag, tuple(parts), self.settings(layer))

    def arrays(self, layer: Any) -> list[mx.array]:
        """Return the row parts of *layer* as they are."""
        return [layer.keys, layer.values]

    def attach(self, layer: Any, leaf: Leaf) -> None:
        """Give a live layer the row parts of *leaf* for its own."""
        layer.keys, layer.values = leaf.arrays
