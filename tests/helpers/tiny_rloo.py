"""Options of an RLOO run of two updates that takes seconds, and a reward function for it."""

CONFIG = {
    "save_steps": 1,
    "scratch_model": "1x16x2",
    "tokenizer_name_or_path": "synthetic",
    "dataset_name": "synthetic",
    "sft_model_path": None,
    "reward_model_path": None,
    "max_train_samples": 16,
    "max_eval_samples": 4,
    "query_length": 64,
    "response_length": 4,
    "length_buckets": (64,),
    "num_generations": 2,
    "batch_size": 4,
    "micro_batch_size": 4,
    "learning_rate": 1e-2,
    "total_episodes": 8,
    "report_to": (),
}


def first_token(completion_ids, **_):
    return [-0.1 * ids[0] if ids else 0.0 for ids in completion_ids]
