"""What tests give to the algorithms: models with params, scored rollouts, optimizers at rates of their own."""

import contextlib

import jax
import optax

from rlhf_jax.algorithms import nonfinite, policy_gradient
from rlhf_jax.algorithms.networks import Models, Network
from rlhf_jax.algorithms.optimizer import Optimizer
from rlhf_jax.types import ScoredRollout


def models_of(policy, reference=None, value=None, *, mesh=None, base=None) -> Models:
    """Models without params; reference None: there is none."""
    return Models(
        policy=Network(policy),
        reference=None if reference is None else Network(reference),
        value=None if value is None else Network(value),
        mesh=mesh,
    ).with_base(base)


def with_params(models: Models, params, ref_params=None) -> Models:
    """The same with whole params; without ref_params there is no reference."""
    reference = None if ref_params is None else models.reference.replace(params=ref_params)
    return models.replace(reference=reference).with_trained(params)


def scored(rollout, scores, scorable=None, token_rewards=None, *, eos_id, group_size=1) -> ScoredRollout:
    """A ScoredRollout."""
    return ScoredRollout(rollout, scores, scorable, token_rewards, eos_ids=(eos_id,), group_size=group_size)


@contextlib.contextmanager
def replaced(module, name, function):
    """Replaces a function of a module while the context is open; programs traced in it call the replacement."""
    real = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, real)


def update_in_order(algorithm, models, state, experience, *, orders=None, key=None, **options):
    """An update, with the metrics of each optimizer step.

    Args:
      algorithm: a module with `update`.
      orders: [epochs, P] int32, the order of the groups in each epoch; None: those that `key` draws.
      key: of the update; None: any.

    Returns:
      (state, metrics, metrics of each step [steps])
    """
    steps, mean = {}, nonfinite.mean_over_steps

    def keep(stats, config):
        steps.update(stats)
        return mean(stats, config)

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(nonfinite, "mean_over_steps", keep))
        if orders is not None:
            stack.enter_context(replaced(policy_gradient, "permutations", lambda *_: orders))
        key = jax.random.key(0) if key is None else key
        state, metrics = algorithm.update(models, state, experience, key=key, **options)
    return state, metrics, steps


def at_rates(transformation: optax.GradientTransformation, rates, *, keeps_finite: bool = True) -> Optimizer:
    """A transformation whose optimizer steps have the rates [N], from the first again after the last."""

    def rate(step):
        return rates[step % rates.shape[0]] if rates.ndim else rates

    def update(grads, opt_state, params=None, *, step, **_):
        updates, opt_state = transformation.update(grads, opt_state, params)
        return jax.tree.map(lambda u: -rate(step) * u, updates), opt_state

    scaled = optax.GradientTransformationExtraArgs(transformation.init, update)
    return Optimizer(scaled, rate, keeps_finite)
