"""`rlhf-jax sweep`: a run for each combination of several values of options, one after another, and a table of them.

The runs share one process, and with it the compiled programs. A run that is finished is not repeated, and one that was
cut is resumed, so the same command continues an interrupted sweep.
"""
