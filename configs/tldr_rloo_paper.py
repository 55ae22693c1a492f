"""TL;DR with RLOO as in the paper (Ahmadian et al. 2024, arXiv 2402.14740): plain REINFORCE, k = 4, Pythia 6.9B."""

from rlhf_jax.config import RLOOConfig

VARIANTS = {"k4": 4, "k2": 2}  # responses to each prompt; the paper's win rates by GPT-4: 77.9 % and 74.2 %
MODELS = "cleanrl/EleutherAI_pythia-6.9b-deduped"  # not the paper's checkpoints, which are not published


def get_config(variant: str | None = None) -> RLOOConfig:
    """The config of a variant (default k4). Lines marked 'paper' follow the paper; the others are our choice."""
    name = variant or "k4"
    return RLOOConfig(
        run_dir=f"runs/tldr_rloo_paper_{name}",  # folder
        sft_model_path=f"{MODELS}__sft__tldr",  # hub name
        reward_model_path=f"{MODELS}__reward__tldr",  # hub name
        num_generations=VARIANTS[name],  # paper: responses to each prompt; the others are the baseline
        policy_loss="reinforce",  # paper: -A log pi of the whole response; no ratio, no clip
        token_level_kl=False,  # paper: the response is one action, with one return
        num_iterations=1,  # paper: one epoch over each batch
        num_mini_batches=1,  # one optimizer step a batch: on-policy
        beta=0.03,  # paper: KL inside the reward; the weight is that of TRL's published runs
        kl_estimator="k1",  # paper: log pi - log pi_ref, summed over the response
        normalize_advantages=False,  # paper: only subtract the baseline
        dataset_name="trl-lib/tldr",  # hub name; 116,722 posts
        query_length=512,  # tokens
        query_overflow="truncate",  # drop trailing paragraphs of longer posts
        total_episodes=307_200,  # responses; 600 updates
        batch_size=512,  # responses an update
        micro_batch_size=32,  # rows a micro-batch
        rollout_batch_size=128,  # rows generated and scored at a time
        learning_rate=1e-6,  # at the peak
        lr_scheduler_type="linear",  # decay to 0
        max_grad_norm=1.0,  # gradient clipping
        response_length=53,  # tokens
        temperature=1.0,  # for sampling and log-probabilities: samples from the policy itself
        stop_token="eos",  # the tokenizer's eos
        missing_eos_penalty=1.0,  # subtracted from the score of a response without eos
        dtype="bfloat16",  # compute dtype; weights stay float32
        gradient_checkpointing=True,  # less memory, a third slower
        mesh_data=-1,  # devices that split rows
        mesh_fsdp=8,  # devices that split rows and shard params, of 80 GB each
        save_steps=50,  # updates
    )
