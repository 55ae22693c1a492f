"""tools/environments.py: what environments keep across responses, for checkpoints."""

import json

import pytest

from rlhf_jax import UserError
from rlhf_jax.tools.environments import Environments, methods


class Plain:
    def reset(self, **row):
        self.steps = 0

    def step(self) -> str:
        """Steps."""
        self.steps += 1
        return str(self.steps)


class Keeps(Plain):
    best = 0

    def state(self):
        return self.best

    def load_state(self, state):
        self.best = state


def opened(**factories):
    return Environments({name or None: kind for name, kind in factories.items()} or {None: Keeps}, 5.0)


def test_what_instances_keep_goes_to_new_ones_in_their_order():
    before = opened()
    instances, _ = before.begin([{}, {}, {}])
    for best, instance in enumerate(instances):
        instance.best = 10 + best
    states = json.loads(json.dumps(before.states()))
    assert states == {"": [10, 11, 12]}
    after = opened()
    assert after.restore(states) == []
    assert [each.best for each in after.begin([{}, {}, {}, {}])[0]] == [10, 11, 12, 0]


def test_instances_of_responses_that_go_on_are_not_reset_and_saved_as_they_were_before():
    environments = opened()
    instances, _ = environments.begin([{}, {}, {}], go_on=True)
    for best, instance in enumerate(instances):
        instance.best = 10 + best
    environments.hold(instances[2:])
    assert environments.states() == {"": [0, 10, 11]}, "those that go on are the first"
    others, _ = environments.begin([{}, {}])
    assert others == instances[:2]
    environments.hold([])
    assert environments.begin([{}])[0] == instances[2:] and environments.states() == {"": [12, 10, 11]}


def test_a_class_without_a_state_is_named_and_the_others_are_restored():
    before = opened(a=Plain, b=Keeps)
    before.begin([{"environment": "b"}])[0][0].best = 3
    after = opened(a=Plain, b=Keeps)
    (lost,) = after.restore(before.states())
    assert lost.startswith("environment Plain is reset: what it keeps across responses is lost")
    assert after.begin([{"environment": "b"}])[0][0].best == 3


def test_state_and_load_state_are_no_tools_where_there_are_both():
    assert set(methods(Keeps())) == {"step"}

    class Half(Plain):
        def state(self) -> str:
            """A tool of this name."""
            return "on"

    assert set(methods(Half())) == {"step", "state"}


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (lambda self: object(), "environment Broken: state failed, or returned what is not of JSON types: TypeError"),
        (lambda self: self.absent, "environment Broken: state failed, .*AttributeError"),
    ],
)
def test_a_state_that_cannot_be_saved_is_an_error_at_the_start(method, said):
    with pytest.raises(UserError, match=said):
        opened(x=type("Broken", (Keeps,), {"state": method}))


def test_a_state_that_is_not_taken_back_ends_the_resume():
    class Refuses(Keeps):
        def load_state(self, state):
            raise ValueError("from another version")

    with pytest.raises(UserError, match="environment Refuses: load_state failed: .*from another version"):
        opened(x=Refuses).restore({"x": [1]})
