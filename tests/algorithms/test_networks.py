"""Where base and adapter meet."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.algorithms.networks import Models, Network
from rlhf_jax.models import custom_shape, lora
from tests.helpers.arrays import distance
from tests.helpers.models_common import random_params

PLAIN = custom_shape("1x16x2", 41, 64)
ADAPTED = dataclasses.replace(PLAIN, lora=lora.Lora(2, 4, 0.0, ("query_key_value",)))
TOKENS = jnp.arange(6)[None] + 3
MASK = jnp.ones((1, 6), bool)


def adapter(base, seed):
    """An adapter whose B is not 0."""
    fresh = lora.init(ADAPTED, jax.random.key(seed), base)
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(seed), x.shape), fresh)


def hidden(network):
    return network.model.hidden(network.params, TOKENS, MASK)


def merged(base, trained):
    """The same network as plain params."""
    return Network(PLAIN, lora.merge_lora(Network(ADAPTED, base=base).with_trained(trained).params))


def test_adapters_are_put_into_their_own_base_or_into_the_policys():
    bases = [random_params(PLAIN, seed=seed) for seed in range(2)]
    trained = {"policy": adapter(bases[0], 0), "value": adapter(bases[0], 1)}
    reference = adapter(bases[0], 2)
    models = Models(Network(ADAPTED), reference=Network(ADAPTED, reference), value=Network(ADAPTED))
    for own, base in ((None, bases[0]), (bases[1], bases[1])):
        on = models.with_base({"policy": bases[0]} if own is None else {"policy": bases[0], "value": own})
        assert set(on.base) == ({"policy"} if own is None else {"policy", "value"})
        whole = on.with_trained(trained)
        assert whole.base is None
        assert distance(hidden(whole.policy), hidden(merged(bases[0], trained["policy"]))) < 1e-5
        assert distance(hidden(whole.reference), hidden(merged(bases[0], reference))) < 1e-5
        assert distance(hidden(whole.value), hidden(merged(base, trained["value"]))) < 1e-5
    assert whole.critic is whole.value and models.replace(value=None).critic is models.policy


def test_models_that_are_trained_in_full_take_their_params_as_they_are():
    params = random_params(PLAIN)
    models = Models(Network(PLAIN), reference=Network(PLAIN), value=Network(PLAIN)).with_base(None)
    whole = models.with_trained({"policy": params})
    assert models.base is None and whole.policy.params is params
    assert whole.value.params is None and whole.reference.params is None  # an update reads neither before it has them
    beside_adapters = models.replace(policy=Network(ADAPTED)).with_base({"policy": params})
    found = beside_adapters.with_trained({"policy": adapter(params, 0), "value": params})
    np.testing.assert_array_equal(jax.tree.leaves(found.value.params)[0], jax.tree.leaves(params)[0])
