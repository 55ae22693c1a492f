"""Tools that a policy calls while it responds."""
