"""What it costs to say why no more was matched."""

from __future__ import annotations

import numpy as np

from bench.common import Laps, Options, Row, at_most, fact, new_root
from bench.lookup import NAMESPACE, random_prompts, tiny_cache
from promptstore import Namespace, PromptStore, Reason, ReasonKind, reasons
from promptstore.matching import Matcher

N_PROMPTS = 1000
N_TOKENS = 1024
_SOME = Reason(ReasonKind.NO_ENTRY)


def match_reason(options: Options) -> list[Row]:
    """Time matches against 1,000 stored prompts, with reasons and without.

    Half of each prompt is shared by all. A request parts from them at 3/4 of one
    prompt, goes on behind the end of one, or shares nothing (so that nothing is
    restored, and reasons weigh most). Without: the same match with a constant in the
    place of each reason, and no look for one.
    """
    n_prompts = 50 if options.quick else N_PROMPTS
    rng = np.random.default_rng(3)
    prompts = random_prompts(rng, n_prompts, N_TOKENS, N_TOKENS // 2)
    odd = random_prompts(rng, 1, N_TOKENS)[0]
    cut = N_TOKENS * 3 // 4
    requests = {
        "diverged": prompts[7][:cut] + odd[cut:],
        "longer": prompts[7] + odd[:100],
        "miss": odd,
    }
    rows: list[Row] = []
    with new_root(options) as root, PromptStore.open(root) as both:
        for prompt in prompts:
            both.insert(NAMESPACE, prompt, tiny_cache(len(prompt)), kind="system")
        both.flush()
        with PromptStore.open(root, memory_bytes=0) as disk:
            for name, request in requests.items():
                rows.append(_row(f"{name}.disk", disk, request, options))
                rows.append(_row(f"{name}.both", both, request, options))
            rows.append(_stranger(disk, prompts[7], options))
    return rows


def _row(name: str, store: PromptStore, request: list[int], options: Options) -> Row:
    laps = _laps(store, NAMESPACE, request, options)
    note = f"{laps.versus('with', 'without')}, {N_TOKENS:,} tokens each"
    return at_most(f"match_reason.{name}", laps.ratio("with", "without"), 1.1, note)


def _stranger(store: PromptStore, request: list[int], options: Options) -> Row:
    """The one look that a match makes for its reason alone: for a namespace of which
    nothing is stored."""
    laps = _laps(store, Namespace("other"), request, options)
    more_ms = laps.median_ms("with") - laps.median_ms("without")
    note = (
        "more, for a miss of a namespace that holds nothing while another holds all; "
        f"{laps.versus('with', 'without')}"
    )
    return fact("match_reason.stranger", more_ms, note, "ms")


def _laps(
    store: PromptStore, namespace: Namespace, request: list[int], options: Options
) -> Laps:
    real = reasons.of_look_up, Matcher._refined, Matcher._of_strangers

    def switch(name: str) -> None:
        functions = real if name == "with" else (_constant,) * 3
        reasons.of_look_up = functions[0]  # type: ignore[assignment]
        Matcher._refined = functions[1]  # type: ignore[method-assign]
        Matcher._of_strangers = functions[2]  # type: ignore[method-assign]

    def match() -> object:
        return store.match(namespace, request)

    n_laps = 20 if options.quick else 400
    laps = Laps({"with": match, "without": match}, n_laps, n_warm=10, before=switch)
    switch("with")
    return laps


def _constant(*_: object) -> Reason:
    """Stand in for what finds a reason."""
    return _SOME
