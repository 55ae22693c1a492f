"""The programs of a PPO update whose collectives tests count, and the bytes that each layout of devices needs."""

LAYERS, WIDTH, HEADS, VOCABULARY = 4, 64, 8, 128
ROWS, MICRO, COLUMNS, T = 32, 16, 16, 8
LAYER = 12 * WIDTH**2  # numbers in the four kernels of a layer
SMALL = 13 * WIDTH  # and in its biases and norms
MESHES = ((8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2))


def compiled(mesh: tuple[int, int, int], devices=None, **more) -> dict:
    """Collectives and largest arrays of the programs of a PPO update on a mesh, by default of all devices."""
    from rlhf_jax.config import PPOConfig
    from rlhf_jax.dry_run import hlo, memory
    from rlhf_jax.parallel import sharding

    config = PPOConfig(
        scratch_model=f"{LAYERS}x{WIDTH}x{HEADS}",
        sft_model_path=None,
        reward_model_path=None,
        tokenizer_name_or_path="synthetic",
        dataset_name="synthetic",
        query_length=COLUMNS,
        length_buckets=(COLUMNS,),
        response_length=T,
        batch_size=ROWS,
        micro_batch_size=MICRO,
        num_ppo_epochs=1,
        num_mini_batches=1,
        **dict(zip(("mesh_data", "mesh_fsdp", "mesh_tensor"), mesh)),
        **more,
    )
    stage = memory.abstract_stage(config, sharding.make_mesh(*mesh, devices=devices))
    found = {}
    for program in memory.programs(stage, only=("generate", "update")):
        text = program.text
        once, twice = hlo.collectives(text, 1), hlo.collectives(text, 2)
        found[program.name] = {
            "sent": sum(c.sent * c.times for c in once),
            "step": sum(c.sent * c.times for c in twice) - sum(c.sent * c.times for c in once),
            "gathers": sum(c.times for c in twice if c.kind == "all-gather" and c.sent > 4 * WIDTH**2)
            - sum(c.times for c in once if c.kind == "all-gather" and c.sent > 4 * WIDTH**2),
            "largest": hlo.largest_array(text)[0],
            "gathered": sorted({c.shape.split("{")[0] for c in once if c.kind == "all-gather"}),
        }
    return found


def gathered(size: float, devices: int) -> float:
    """Bytes a device sends so that all have an array of so many numbers; as much to deal it out again."""
    return 4 * size * (devices - 1) / devices


def summed(size: float, devices: int) -> float:
    """And so that all have the sum of theirs."""
    return 2 * gathered(size, devices)


def update_needs(data: int, fsdp: int, tensor: int, *, reduce_scatters: bool = False) -> float:
    """Bytes a device must send in an update, micro-batch by micro-batch, of policy and value model.

    fsdp: a layer's kernels are gathered for the forward and again for the backward pass; embeddings and hidden states
    are dealt out between the devices' columns and their rows. tensor: activations are summed twice a layer forward and
    twice backward. Gradients are summed over all rows. XLA has no reduce-scatter for CPUs: it sums whole gradients over
    fsdp and keeps a part, where others, `reduce_scatters`, send half.
    """
    kernel_gradient = gathered if reduce_scatters else summed
    rows = MICRO // (data * fsdp)
    states = rows * (COLUMNS + T) * WIDTH
    both = 2 * (  # policy and value model
        2 * LAYERS * gathered(LAYER / tensor, fsdp)
        + LAYERS * (kernel_gradient(LAYER / tensor, fsdp) + summed(LAYER / tensor / fsdp, data))
        + LAYERS * summed(SMALL, data * fsdp)
        + 4 * LAYERS * summed(states, tensor)
        + 2 * gathered(states, fsdp)  # of the embedding, forward and backward
        + summed(states, tensor)
        + summed(VOCABULARY * WIDTH / fsdp / tensor, data)
    )
    answered = MICRO // data * T
    head = gathered(answered * WIDTH, fsdp) + summed(answered * WIDTH, fsdp * tensor)
    head += 6 * summed(answered, fsdp * tensor) + summed(VOCABULARY * WIDTH / fsdp / tensor, data)
    return ROWS / MICRO * (both + head)


def decode_needs(data: int, fsdp: int, tensor: int) -> float:
    """Bytes a device must send for one token a row: activations summed twice a layer and once for the embedding, the
    logits dealt out so that each device draws for rows of its own. What fsdp splits was gathered before."""
    rows = ROWS // (data * fsdp)
    return (2 * LAYERS + 1) * summed(rows * WIDTH, tensor) + gathered(rows * VOCABULARY / tensor, tensor)


def name_of(mesh):
    return "x".join(map(str, mesh))
