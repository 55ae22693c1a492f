"""The models of an algorithm with their params: where base, adapter and frozen parts meet."""

from __future__ import annotations

from typing import Any

import flax

from rlhf_jax.generate.guided import Automaton
from rlhf_jax.types import Params


class Network(flax.struct.PyTreeNode):
    """A model and its params."""

    model: Any = flax.struct.field(pytree_node=False)  # static: its config and functions
    params: Params | None = None
    base: Params | None = None  # frozen params that adapters, or the trained part, are put into; None: trained in full
    automaton: Automaton | None = None  # of guided responses, whose log-probabilities are of the tokens that it allows

    def with_trained(self, trained: Params) -> Network:
        """The network with whole params: the trained ones, put into the base if there is one."""
        params = trained if self.base is None else self.model.with_lora(self.base, trained)
        return self.replace(params=params, base=None)


class Models(flax.struct.PyTreeNode):
    """The models that an algorithm reads.

    Forward passes take `policy.params`, `value.params` and `reference.params` as whole params. An update gets the
    trained params by TrainState instead, whose buffers it overwrites: there `policy.params` and `value.params` are
    None until `with_trained` sets them.
    """

    policy: Network
    reference: Network | None = None  # None: the algorithm has no KL penalty
    value: Network | None = None  # None: there is no value model, or the policy carries the value head
    mesh: Any = flax.struct.field(pytree_node=False, default=None)  # rows are sharded over it; None: one device

    @property
    def critic(self) -> Network:
        """The network with the value head."""
        return self.policy if self.value is None else self.value

    @property
    def base(self) -> dict[str, Params] | None:
        """The frozen bases: {"policy": ..., "value": ... where the value model has its own}; None: there are none."""
        if self.policy.base is None:
            return None
        two_bases = self.value is not None and self.value.base is not None and self.value.base is not self.policy.base
        return {"policy": self.policy.base, **({"value": self.value.base} if two_bases else {})}

    def with_base(self, base: dict[str, Params] | None) -> Models:
        """The same on these bases; the reference's is the policy's, and so is the value model's without its own."""
        base = base or {}
        policy = base.get("policy")

        def on(network: Network | None, base: Params | None) -> Network | None:
            return None if network is None else network.replace(base=base)

        value = on(self.value, base.get("value", policy))
        return self.replace(policy=on(self.policy, policy), reference=on(self.reference, policy), value=value)

    def with_automaton(self, automaton: Automaton | None) -> Models:
        """The same with log-probabilities of the tokens that an automaton allows; None: of all tokens."""
        reference = None if self.reference is None else self.reference.replace(automaton=automaton)
        return self.replace(policy=self.policy.replace(automaton=automaton), reference=reference)

    def with_trained(self, trained: Params) -> Models:
        """The same with whole params of all models.

        Args:
          trained: {"policy": ..., "value": ...} as in TrainState: params, or adapters where there is a base; without
            "value" the value model stays without params.
        """
        value, reference = self.value, self.reference
        if value is not None:
            value = value.with_trained(trained["value"]) if "value" in trained else value.replace(base=None)
        if reference is not None:
            has_params = reference.params is not None
            reference = reference.with_trained(reference.params) if has_params else reference.replace(base=None)
        return self.replace(policy=self.policy.with_trained(trained["policy"]), value=value, reference=reference)
