"""RLOO on a vision-language model, after TRL's examples/scripts/rloo_vlm.py: SmolVLM on mathematics about pictures.

The data set's questions are texts; this writes them as conversations, with the system message that asks for the format:

    python configs/rloo_smolvlm.py

It needs the hub, the extras `vision` and `math`, and a GPU.
"""

from rlhf_jax.config import RLOOConfig

DATA = "data/multimodal-open-r1-8k-verified"
SYSTEM = "First think between <think> and </think>, then give the answer. Put the final answer into \\boxed{}."
# Rows a micro-batch, rows generated at a time.
VARIANTS = {"256m": (8, 32), "500m": (8, 32), "2.2b": (4, 16)}


def get_config(variant: str | None = None) -> RLOOConfig:
    """The config of one variant (default 256m)."""
    variant = variant or "256m"
    micro_batch_size, rollout_batch_size = VARIANTS[variant]
    names = {"256m": "SmolVLM-256M-Instruct", "500m": "SmolVLM-500M-Instruct", "2.2b": "SmolVLM2-2.2B-Instruct"}
    return RLOOConfig(
        run_dir=f"runs/rloo_smolvlm_{variant}",  # folder
        sft_model_path=f"HuggingFaceTB/{names[variant]}",  # hub name or folder
        dataset_name=DATA,  # columns prompt, image and solution
        dataset_test_split="test",  # 100 rows
        max_eval_samples=64,  # held-out rows
        reward_model_path=None,  # rewards are functions
        reward_funcs=("think_format_reward", "accuracy_reward"),  # 1 or 0 each, summed; needs the extra [math]
        query_length=2048,  # tokens, those of the images included
        num_train_epochs=1.0,  # epochs over the prompts
        batch_size=64,  # responses an update
        micro_batch_size=micro_batch_size,  # rows a micro-batch
        rollout_batch_size=rollout_batch_size,  # rows generated and scored at a time
        num_generations=2,  # responses to each prompt
        use_peft=True,  # adapters alone are trained
        lora_target_modules=("q_proj", "v_proj"),  # of the text model and of the vision tower
        learning_rate=1e-5,  # linear decay to 0
        lr_scheduler_unit="optimizer_step",  # unit of a schedule step
        max_grad_norm=1.0,  # gradient clipping
        response_length=1024,  # tokens
        temperature=1.0,  # for sampling and log-probabilities
        dtype="bfloat16",  # compute dtype; adapters stay float32
        gradient_checkpointing=True,  # less memory, a third slower
        log_completions=True,  # write training completions, with thumbnails
        save_steps=50,  # updates
    )


def main() -> None:
    """Writes the data set as conversations to DATA."""
    import datasets

    def conversation(row):
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["problem"]}]
        return {"prompt": messages}

    table = datasets.load_dataset("lmms-lab/multimodal-open-r1-8k-verified", split="train")
    others = [name for name in table.column_names if name not in ("image", "solution")]
    table = table.map(conversation, remove_columns=others)
    table.train_test_split(test_size=100, seed=42).save_to_disk(DATA)


if __name__ == "__main__":
    main()
