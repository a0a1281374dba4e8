"""Plans the masks of a model with different layers on one layout of the tokens."""

from collections.abc import Sequence
from typing import Any

from .._checks import as_list, integer, list_of, require_type
from ..masks import AttnMask
from ._balance import WeightedBands
from ._capacity import checked_ranks
from ._compiled import merge
from ._cost import CostModel
from ._layout import make_layout
from ._levels import LevelChoice, levels_to_try
from ._plan import ContextPlan
from ._plan_context import mask_bands, plan_layout

_MOST_CELLS = 2**62


def plan_contexts(
    masks: Sequence[AttnMask],
    cp_size: int,
    *,
    weights: Sequence[int] | None = None,
    chunk_size: int | None = None,
    two_levels: LevelChoice | list[bool] = "auto",
    cost: CostModel = CostModel(),  # noqa: B008 (frozen, so safe to share)
) -> tuple[ContextPlan, ...]:
    """Returns plans of several masks on one layout, for models whose layers have different masks.

    Tokens stay where they are from layer to layer, so all layers share a layout. It is made like
    ``layout="balanced"`` of `jaxmagi.plan_context`, but for the sum of the masks' areas by weight. The areas
    of a single mask may differ more between ranks.

    Args:
        masks: the masks of the layers, for one sequence, each as for `jaxmagi.plan_context`.
        cp_size: the number of ranks, at most 4096.
        weights: how many layers have each mask; by default one.
        chunk_size: see `jaxmagi.plan_context`.
        two_levels: see `jaxmagi.plan_context`; a list has one for each mask. ``"auto"`` may choose otherwise
            for each mask and each sequence: for a stream of sequences under one compilation, give
            ``[plan.two_levels for plan in plans]`` of the plans of the first sequence.
        cost: see `jaxmagi.plan_context`.

    Returns:
        A plan for each mask, all with the same ``token_order``.

    Raises:
        ValueError: there is no mask, they differ in length, the weights are not as many integers above zero
            or are so large that areas leave 64 bits, ``two_levels`` is a list with another number of entries
            than masks, or for what `jaxmagi.plan_context` refuses.
        NotImplementedError: see `jaxmagi.plan_context`.

    Examples:
        >>> full, window = plan_contexts(
        ...     [masks.causal(4096), masks.sliding_window(4096, 511)], cp_size=4, weights=[1, 5]
        ... )
        >>> bool((full.token_order == window.token_order).all())
        True
    """
    masks = list_of(masks, AttnMask, "masks")
    layers = _weighted_masks(masks, weights)
    cp_size = checked_ranks(cp_size)
    require_type(cost, CostModel, "cost")
    choices = [
        levels_to_try(each, None, cp_size, cost.ranks_per_host)
        for each in _per_mask(two_levels, "two_levels", len(masks))
    ]
    length = masks[0].q_len
    token_order = make_layout(layers, length, cp_size, "balanced", chunk_size, cost)
    return tuple(
        plan_layout(layer.bands, length, token_order, cp_size, each, cost)
        for layer, each in zip(layers, choices, strict=True)
    )


def _per_mask(value: Any, name: str, num_masks: int) -> list[Any]:
    if not isinstance(value, list):
        return [value] * num_masks
    if len(value) != num_masks:
        raise ValueError(f"plan_contexts got {name}={value} for {num_masks} masks.")
    return [*value]


def _weighted_masks(masks: list[AttnMask], weights: Sequence[int] | None) -> list[WeightedBands]:
    bands = [merge(mask_bands(mask)) for mask in masks]
    lengths = [mask.q_len for mask in masks]
    if len(set(lengths)) != 1:
        raise ValueError(
            f"plan_contexts takes masks of one length, at least one, but their lengths are {lengths}."
        )
    weights = [1] * len(masks) if weights is None else as_list(weights, "weights")
    if len(weights) != len(masks):
        raise ValueError(f"plan_contexts got {len(weights)} weights for {len(masks)} masks.")
    layers = [
        WeightedBands(table, integer(weight, f"weights[{i}]", minimum=1))
        for i, (table, weight) in enumerate(zip(bands, weights, strict=True))
    ]
    if sum(layer.area * layer.weight for layer in layers) >= _MOST_CELLS:
        raise ValueError(f"weights={weights} make the masks' areas leave 64 bits: use smaller ones.")
    return layers
