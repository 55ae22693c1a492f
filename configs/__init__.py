"""The shipped configs. Each file defines get_config(variant=None); `--config NAME` finds it here."""
