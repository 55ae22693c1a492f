"""Types and ranges of config fields."""

from rlhf_jax.config import STAGES, values


def test_every_number_has_a_range_but_those_of_processes():
    for config_type in STAGES.values():
        hints, ranges = values.field_types(config_type), values.field_ranges(config_type)
        numbers = {name for name, hint in hints.items() if values.without_none(hint)[0] in (int, float)}
        assert numbers - set(ranges) == {"num_processes", "process_id"}, config_type
        assert set(ranges) <= numbers
