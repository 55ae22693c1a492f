"""Fields of the configs: documented, read somewhere, declared once."""

import ast

from rlhf_jax.config import STAGES, Pipeline, PolicyConfig, PPOConfig, RLOOConfig, StageConfig
from rlhf_jax.option import field_types
from tests.helpers.paths import PACKAGE


def test_every_field_has_a_line_of_meaning():
    documented = set()
    for path in (PACKAGE / "config" / "stages.py", *PACKAGE.rglob("*options.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                for field, doc in zip(node.body, node.body[1:], strict=False):
                    if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr):
                        documented.add((node.name, field.target.id))
    for config_type in (*STAGES.values(), Pipeline):
        for name in config_type.__dataclass_fields__:
            owners = [base.__name__ for base in config_type.__mro__ if name in vars(base).get("__annotations__", {})]
            assert any((owner, name) in documented for owner in owners)


# Functions that read options for whoever calls them.
READERS = {"sampling": {*PPOConfig().sampling(), "generation_kwargs"}}
READERS["remat"] = {"gradient_checkpointing", "gradient_checkpointing_policy"}
READERS["epochs_per_update"] = {"num_ppo_epochs", "num_iterations"}


def test_every_field_is_read_somewhere():
    """An option that nothing reads is TRL's max_grad_norm all over again."""
    read = set()
    for path in PACKAGE.rglob("*.py"):
        if (
            path.parent.name != "config"
            and not path.name.endswith("options.py")
            and path.relative_to(PACKAGE).as_posix() != "dry_run/report.py"
        ):
            tree = ast.parse(path.read_text())
            names = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
            read |= names
            # getattr(config, "name"), for options that not every stage has
            calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
            gets = [n.args[1] for n in calls if isinstance(n.func, ast.Name) and n.func.id == "getattr"]
            read |= {arg.value for arg in gets if isinstance(arg, ast.Constant)}
            called = names | {n.func.id for n in calls if isinstance(n.func, ast.Name)}
            read |= {option for reader, options in READERS.items() if reader in called for option in options}
    fields = {name for config_type in STAGES.values() for name in config_type.__dataclass_fields__}
    in_arithmetic_alone = {"total_episodes", "max_steps", "num_train_epochs"}
    assert fields - read <= in_arithmetic_alone, f"nothing reads {sorted(fields - read - in_arithmetic_alone)}"


def test_what_ppo_and_rloo_share_is_declared_once():
    """RLOO's own defaults aside, an option of both is PolicyConfig's or has the same type."""
    for name in PPOConfig.__dataclass_fields__.keys() & RLOOConfig.__dataclass_fields__.keys():
        assert field_types(PPOConfig)[name] == field_types(RLOOConfig)[name], name
    assert issubclass(PolicyConfig, StageConfig)
