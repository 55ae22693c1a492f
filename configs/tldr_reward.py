"""TL;DR, stage 2: a reward model from human preferences between summaries (the N+ recipe)."""

from rlhf_jax.config import RewardConfig

# Size: pairs a micro-batch, mesh (data, fsdp, tensor), for 8 devices of 80 GB, or one GPU of the named memory; data
# takes the remaining devices.
VARIANTS = {
    "1b": (64, (-1, 1, 1)),
    "2.8b": (32, (-1, 8, 1)),
    "6.9b": (8, (-1, 8, 1)),
    "12b": (8, (-1, 8, 1)),
    "410m_24gb": (4, (1, 1, 1)),
}


def get_config(variant: str | None = None) -> RewardConfig:
    """The config of one size (default 1b)."""
    variant = variant or "1b"
    size = variant.split("_")[0]
    sft = f"cleanrl/EleutherAI_pythia-{size}-deduped__sft__tldr"
    if size in ("410m", "12b"):  # not on the hub: train it by tldr_sft.py, same variant
        sft = f"runs/tldr_sft_{variant}/policy"
    micro_batch_size, (data, fsdp, tensor) = VARIANTS[variant]
    return RewardConfig(
        run_dir=f"runs/tldr_reward_{variant}",  # folder
        model_name_or_path=sft,  # hub name; or tldr_sft's RUN/policy
        dataset_name="trl-lib/tldr-preference",  # hub name; 92,858 pairs
        query_length=512,  # tokens of the post
        max_length=638,  # tokens of post and summary; longer pairs are dropped
        batch_size=64,  # pairs an update
        micro_batch_size=micro_batch_size,  # pairs a micro-batch
        num_train_epochs=1,  # epochs over the pairs
        learning_rate=3e-6,  # at the peak
        lr_scheduler_type="cosine",  # decay to 0
        adam_epsilon=1e-5,  # added to the square root
        weight_decay=0.01,  # torch's AdamW default
        weight_decay_on="all",  # as torch's AdamW
        normalize_dataset_name="trl-lib/tldr",  # shift scores to a mean of 0 on these demonstrations
        dtype="bfloat16",  # compute dtype; weights stay float32
        gradient_checkpointing=size != "1b",  # less memory, a third slower
        eval_steps=100,  # updates
        mesh_data=data,  # devices that split rows
        mesh_fsdp=fsdp,  # devices that split rows and shard params
        mesh_tensor=tensor,  # devices that split heads
        save_steps=250,  # updates
    )
