#!/usr/bin/env bash
# Records tests/parity/cases again. The options of each case are defined here.
#
#   scripts/parity/record_cases.sh PYTHON LEGACY_PYTHON [CASE...]
#
# PYTHON: interpreter with trl==1.12.0; LEGACY_PYTHON: with trl==0.17.0 (see scripts/parity/record_trl.py).
set -euo pipefail
python=$1 legacy=$2
shift 2
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export OMP_NUM_THREADS=1

adam='"adam_beta1": 0.8, "adam_beta2": 0.98, "weight_decay": 0.1'

record() { # NAME TRAINER FLAGS...: records the case if it is selected
  local name=$1 trainer=$2
  shift 2
  [ -z "$only" ] || [[ " $only " == *" $name "* ]] || return 0
  local interpreter=$python
  [ "$trainer" = rloo_legacy ] && interpreter=$legacy
  echo "$name"
  "$interpreter" scripts/parity/record_trl.py "$trainer" "tests/parity/cases/$name" "$@" >/dev/null 2>"$log" ||
    { cat "$log" >&2; exit 1; }
}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
only="$*"

record ppo_small ppo --updates 3 --init_std 0.1
record ppo_options ppo --updates 3 --micro 16 --sequential --eos_fill --options "{
  \"kl_estimator\": \"k3\", \"whiten_rewards\": true, \"missing_eos_penalty\": 0.5, \"num_mini_batches\": 2,
  \"gamma\": 0.95, \"lam\": 0.8, \"cliprange\": 0.1, \"cliprange_value\": 0.05, \"vf_coef\": 0.5, \"kl_coef\": 0.2,
  \"temperature\": 1.3, \"warmup_steps\": 1, \"lr_scheduler_type\": \"cosine\", $adam}"
# The second update uses the last batch of an epoch of the prompts.
record ppo_crafted ppo --crafted --accum 2 --prompts 32 --options '{"missing_eos_penalty": 1.0, "num_ppo_epochs": 3}'
record ppo_no_stop ppo --crafted --micro 4 --accum 3 --options '{"stop_token": null, "missing_eos_penalty": 1.0,
  "local_rollout_forward_batch_size": 4, "lr_scheduler_type": "constant"}'
record ppo_stop_id ppo --crafted --sequential --options '{"stop_token_id": 5, "num_ppo_epochs": 1, "kl_coef": 0.0}'

# LoRA; TRL trains the value model in full. The reference is the policy without adapter, or a second adapter.
record lora_small ppo --updates 3 --init_std 0.1 --options '{"use_peft": true, "lora_r": 4, "lora_alpha": 8}'
record lora_rslora ppo --updates 3 --micro 16 --sequential --eos_fill --options "{
  \"use_peft\": true, \"lora_r\": 3, \"lora_alpha\": 5, \"use_rslora\": true, \"lora_target_modules\": [\"all-linear\"],
  \"lora_modules_to_save\": [\"lm_head\", \"final_layer_norm\"],
  \"kl_estimator\": \"k3\", \"whiten_rewards\": true, \"missing_eos_penalty\": 0.5, \"num_mini_batches\": 2,
  \"gamma\": 0.95, \"lam\": 0.8, \"cliprange\": 0.1, \"cliprange_value\": 0.05, \"vf_coef\": 0.5, \"kl_coef\": 0.2,
  \"temperature\": 1.3, \"warmup_steps\": 1, \"lr_scheduler_type\": \"cosine\", $adam}"
record lora_named_ref ppo --crafted --accum 2 --options '{"use_peft": true, "lora_r": 4, "lora_target_modules":
  ["query_key_value", "dense_4h_to_h"], "ref_adapter_name": "first", "missing_eos_penalty": 1.0}'

record rloo_small rloo --functions low_ids --updates 6 --options '{"sync_ref_model": true, "ref_model_sync_steps": 2,
  "ref_model_mixup_alpha": 0.3}'
record rloo_options rloo --functions even_share low_ids sometimes --updates 12 --sequential --options "{
  \"num_generations\": 4, \"num_iterations\": 2, \"steps_per_generation\": 2, \"epsilon\": 0.1, \"epsilon_high\": 0.3,
  \"beta\": 0.1, \"reward_weights\": [0.7, 1.5, -0.4], \"reward_clip_range\": [-0.5, 1.2],
  \"normalize_advantages\": true, \"mask_truncated_completions\": true, \"warmup_steps\": 2, $adam}"
# Groups with equal rewards, with one scored row and with none; no KL penalty.
record rloo_crafted rloo --functions hard_groups --crafted --accum 2 --updates 3 --options '{"beta": 0.0,
  "mask_truncated_completions": true, "max_grad_norm": 0.3, "lr_scheduler_type": "cosine"}'
# Each optimizer step uses two generation batches, and the run ends within an epoch of the data.
record rloo_straddling rloo --functions hard_groups sometimes --crafted --accum 2 --updates 3 --options '{
  "steps_per_generation": 1, "num_generations": 4, "beta": 0.3, "temperature": 1.2, "normalize_advantages": true}'

record rloo_lora rloo --updates 4 --layers 1 --options '{"use_peft": true, "lora_r": 4, "lora_dropout": 0.0,
  "lora_target_modules": ["all-linear"], "num_iterations": 2, "beta": 0.1}'

# GRPO: every loss type. The ratio is not 1 where a generation batch has several optimizer steps.
record grpo_dapo grpo --accum 2 --updates 6 --options '{"num_generations": 4, "steps_per_generation": 4,
  "num_iterations": 2, "epsilon": 0.1, "epsilon_high": 0.15, "delta": 1.3, "temperature": 0.9,
  "learning_rate": 0.005}'
record grpo_kl grpo --functions low_ids --updates 6 --options "{\"loss_type\": \"grpo\", \"num_generations\": 2,
  \"beta\": 0.2, \"num_iterations\": 3, \"sync_ref_model\": true, \"ref_model_sync_steps\": 2, \"epsilon\": 0.01,
  \"ref_model_mixup_alpha\": 0.3, \"warmup_steps\": 2, $adam}"
record grpo_gdpo grpo --functions even_share low_ids sometimes --accum 2 --updates 4 --sequential --options '{
  "loss_type": "bnpo", "num_generations": 4, "reward_weights": [0.7, 1.5, -0.4], "lr_scheduler_type": "cosine",
  "multi_objective_aggregation": "normalize_then_sum", "steps_per_generation": 4, "max_grad_norm": 0.3}'
# Groups with equal rewards, with one scored row and with none; truncated rows are masked.
record grpo_crafted grpo --functions hard_groups sometimes --crafted --accum 2 --updates 3 --options '{
  "loss_type": "dr_grpo", "num_generations": 4, "scale_rewards": false, "mask_truncated_completions": true,
  "beta": 0.1, "use_bias_correction_kl": false}'
record grpo_entropy grpo --accum 2 --updates 6 --options '{"loss_type": "cispo", "num_generations": 4,
  "epsilon_high": 1.1, "num_iterations": 2, "top_entropy_quantile": 0.4, "use_adaptive_entropy": true,
  "entropy_coef": 0.05, "entropy_coef_delta": 0.02, "entropy_target": 2.89, "entropy_coef_min": 0.04,
  "entropy_coef_max": 0.08}'
record grpo_luspo grpo --family qwen3 --accum 2 --updates 4 --options '{"loss_type": "luspo", "num_generations": 4,
  "importance_sampling_level": "sequence", "num_iterations": 2, "beta": 0.1, "epsilon": 0.002,
  "epsilon_high": 0.0025, "entropy_coef": 0.02, "top_entropy_quantile": 0.5}'
record grpo_sapo grpo --family llama --updates 4 --options '{"loss_type": "sapo", "num_generations": 4,
  "scale_rewards": "batch", "num_iterations": 2, "sapo_temperature_neg": 1.5, "sapo_temperature_pos": 0.8}'
record grpo_vespo grpo --crafted --accum 2 --updates 4 --options '{"loss_type": "vespo", "num_generations": 8,
  "num_iterations": 2, "off_policy_mask_threshold": 0.01, "vespo_k_pos": 1.5, "vespo_lambda_pos": 2.5,
  "vespo_k_neg": 2.5, "vespo_lambda_neg": 1.5, "entropy_coef": -0.03}'

# Other families, sizes and switches in tests/parity/recording/families.py. GPT-2 by PPO: TRL's RLOO trains it at other
# positions than it sampled where prompts differ in length.
record rloo_llama rloo --family llama --updates 3
record ppo_llama ppo --family llama --updates 2
record rloo_qwen3 rloo --family qwen3 --updates 3 --functions low_ids --options '{"num_iterations": 2}'
record ppo_gemma2 ppo --family gemma2 --updates 2 --crafted --options '{"missing_eos_penalty": 1.0}'
record rloo_gemma3 rloo --family gemma3_text --updates 3 --crafted --functions hard_groups
record ppo_gpt2 ppo --family gpt2 --updates 3 --eos_fill
# Cases of one shape share their starting weights and tokenizer.
for pair in rloo_llama:ppo_llama rloo_llama:grpo_sapo rloo_qwen3:grpo_luspo rloo_options:grpo_gdpo \
  rloo_small:grpo_{dapo,kl,crafted,entropy,vespo}; do
  for part in policy tokenizer; do
    from="tests/parity/cases/${pair%:*}/$part" to="tests/parity/cases/${pair#*:}/$part"
    if diff -rq "$from" "$to" >/dev/null; then
      rm -r "$to"
      ln -s "../${pair%:*}/$part" "$to"
    fi
  done
done

record legacy_small rloo_legacy --updates 3
record legacy_options rloo_legacy --micro 4 --accum 2 --sequential --options "{
  \"rloo_k\": 4, \"num_mini_batches\": 2, \"normalize_reward\": true, \"reward_clip_range\": 0.5,
  \"normalize_advantage\": true, \"token_level_kl\": true, \"missing_eos_penalty\": 1.0, \"kl_coef\": 0.2,
  \"cliprange\": 0.1, \"temperature\": 1.3, \"num_ppo_epochs\": 3, \"warmup_steps\": 1,
  \"lr_scheduler_type\": \"cosine\", $adam}"
record legacy_crafted rloo_legacy --crafted --prompts 8 --accum 2 --options '{"stop_token": null,
  "local_rollout_forward_batch_size": 4}'

record vision_rloo vision --prompts 8 --updates 2 --seed 5 --options '{"images": [0, 2], "num_generations": 2}'
record vision_grpo vision --prompts 4 --updates 1 --micro 4 --seed 4 --options '{"trainer": "grpo", "images": [1, 1],
  "image_splitting": true, "beta": 0.04, "num_generations": 2, "max_completion_length": 6}'
