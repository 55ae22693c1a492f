"""TL;DR, stage 1: supervised fine-tuning of Pythia on Reddit posts and their summaries (the N+ recipe)."""

from rlhf_jax.config import SFTConfig

# Size: rows a micro-batch, mesh (data, fsdp, tensor), for 8 devices of 80 GB, or one GPU of the named memory; data
# takes the remaining devices.
VARIANTS = {
    "1b": (128, (-1, 1, 1)),
    "2.8b": (32, (-1, 8, 1)),
    "6.9b": (8, (-1, 8, 1)),
    "12b": (8, (-1, 8, 1)),
    "410m_24gb": (8, (1, 1, 1)),
}


def get_config(variant: str | None = None) -> SFTConfig:
    """The config of one size (default 1b)."""
    variant = variant or "1b"
    size = variant.split("_")[0]
    micro_batch_size, (data, fsdp, tensor) = VARIANTS[variant]
    return SFTConfig(
        run_dir=f"runs/tldr_sft_{variant}",  # folder
        model_name_or_path=f"EleutherAI/pythia-{size}-deduped",  # hub name
        dataset_name="trl-lib/tldr",  # hub name; 116,722 posts
        query_length=512,  # tokens of the post; longer posts lose trailing paragraphs
        max_length=562,  # tokens of post and summary
        batch_size=128,  # rows an update
        micro_batch_size=micro_batch_size,  # rows a micro-batch
        num_train_epochs=1,  # epochs over the data
        learning_rate=3e-6,  # at the peak
        lr_scheduler_type="cosine",  # decay to 0
        adam_epsilon=1e-5,  # added to the square root
        weight_decay=0.01,  # torch's AdamW default
        weight_decay_on="all",  # as torch's AdamW
        dtype="bfloat16",  # compute dtype; weights stay float32
        gradient_checkpointing=size != "1b",  # less memory, a third slower
        eval_steps=100,  # updates
        mesh_data=data,  # devices that split rows
        mesh_fsdp=fsdp,  # devices that split rows and shard params
        mesh_tensor=tensor,  # devices that split heads
        save_steps=250,  # updates
    )
