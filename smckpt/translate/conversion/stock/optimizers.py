"""The state of an optimizer as `Optimizer.state_dict()` gives it, with numbered parameters."""

from __future__ import annotations

from typing import Any

from smckpt.checkpoint.records.parameter_names import are_groups

__all__ = ["numbered"]


def numbered(state: Any) -> Any:
    """Number the parameters by their order in param_groups, as torch does.

    Args:
        state: of an optimizer, under the names of its parameters. Any other is left as it is.
    """
    if not isinstance(state, dict) or not are_groups(state.get("param_groups")):
        return state
    names = [name for group in state["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    groups = [
        {**group, "params": [numbers[name] for name in group["params"]]}
        for group in state["param_groups"]
    ]
    if not isinstance(state.get("state"), dict):
        return {**state, "param_groups": groups}
    found = {numbers.get(name, name): slots for name, slots in state["state"].items()}
    order = sorted(found, key=lambda key: key if isinstance(key, int) else len(names))
    return {**state, "state": {key: found[key] for key in order}, "param_groups": groups}
