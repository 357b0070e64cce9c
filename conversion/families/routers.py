"""Arguments of Megatron's router for the kinds of routers that models have."""

from __future__ import annotations


def softmax_router(topk: int, *, normalised: bool) -> dict[str, object]:
    """Arguments of a softmax router; `normalised` where the weights of the chosen experts sum to one.

    Raises:
        ValueError: one expert per token with normalised weights, which Megatron does not have.
    """
    if normalised:
        _check_normalised(topk)
    return dict(moe_router_score_function="softmax", moe_router_pre_softmax=not normalised)


def sigmoid_router(topk: int, *, scaling: float, groups: int, chosen_groups: int) -> dict[str, object]:
    """Arguments of a sigmoid router with correction bias and normalised weights; it chooses within `chosen_groups` of `groups`.

    Raises:
        ValueError: Megatron would choose other groups, or not normalise.
    """
    _check_normalised(topk)
    if groups > 1 and topk // chosen_groups != 2:
        # transformers and vLLM rate a group by the sum of its best two experts, Megatron by that of its best topk / topk_group.
        raise ValueError(
            f"config.json: num_experts_per_tok={topk} with topk_group={chosen_groups} is not supported; Megatron routes to the same groups "
            "only where the first is twice the second"
        )
    return dict(
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_pre_softmax=False,
        moe_router_topk_scaling_factor=scaling,
        # Group-limited routing with one group is routing without groups; Megatron takes None for that.
        moe_router_num_groups=None if groups == 1 else groups,
        moe_router_group_topk=None if groups == 1 else chosen_groups,
    )


def _check_normalised(topk: int) -> None:
    if topk == 1:
        raise ValueError("config.json: num_experts_per_tok=1 with normalised weights is not supported; Megatron needs two experts for that")
