"""RLOO of Qwen3-0.6B with LoRA on format and accuracy: TRL's example script, on DeepMath-103K."""

from rlhf_jax.config import RLOOConfig


def get_config(variant: str | None = None) -> RLOOConfig:
    """The config; there are no variants.

    The script's questions are NuminaMath-TIR's behind a system message that asks for <think>; Qwen3 thinks by itself.
    """
    return RLOOConfig(
        run_dir="runs/rloo_qwen3",  # folder
        sft_model_path="Qwen/Qwen3-0.6B",  # hub name or folder
        dataset_name="trl-lib/DeepMath-103K",  # hub name; questions as conversations, and their solutions
        dataset_test_split="test",  # 5 % of the questions
        max_eval_samples=64,  # held-out rows
        reward_funcs=("think_format_reward", "accuracy_reward"),  # summed; the second needs the extra [math]
        use_peft=True,  # LoRA
        lora_r=8,  # rank
        lora_alpha=8,  # the adapter's output is scaled by lora_alpha / lora_r
        lora_dropout=0.0,  # dropout on adapter inputs
        query_length=512,  # tokens
        query_overflow="drop",  # drop longer prompts; TRL keeps them
        num_train_epochs=3.0,  # epochs over the prompts
        batch_size=64,  # responses an update: 8 in each of steps_per_generation = 8
        micro_batch_size=8,  # rows a micro-batch
        num_generations=2,  # responses to each prompt
        num_iterations=1,  # epochs over each batch
        num_mini_batches=4,  # optimizer steps an epoch, gradient_accumulation_steps = 2 each
        policy_loss="clipped",  # ratio of the whole response, clipped to 1 - epsilon .. 1 + epsilon
        epsilon=0.2,  # clip range of that ratio
        kl_estimator="k1",  # summed over the response, subtracted from its score
        beta=0.05,  # reward units per nat of KL
        learning_rate=1e-5,  # linear decay to 0
        lr_scheduler_unit="optimizer_step",  # unit of a schedule step
        max_grad_norm=1.0,  # gradient clipping
        response_length=1024,  # tokens
        temperature=1.0,  # for sampling and log-probabilities
        stop_token="eos",  # the tokenizer's eos, which ends a turn of the chat template
        dtype="bfloat16",  # compute dtype; weights stay float32
        gradient_checkpointing=True,  # less memory, a third slower
        mesh_data=-1,  # devices that split rows: all
        log_completions=True,  # print and write responses of training batches
        num_completions_to_print=2,  # in the terminal
        save_steps=200,  # updates
    )
