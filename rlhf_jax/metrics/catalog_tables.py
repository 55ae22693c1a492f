"""The tables of `explained`: (title, words, rows), a row (names, what it is, where it is healthy, what to do)."""

from __future__ import annotations

Rows = tuple[tuple[str, str, str, str], ...]

REWARD: Rows = (
    (
        "objective/scores",
        "Mean score of the batch's responses, after the missing-eos penalty (RLOO: after normalisation and clipping "
        "too), before the KL.",
        "Rises, fast at first, then slowly.",
        "Flat: raise learning_rate, lower kl_coef (beta), look whether the rewards tell responses apart. Rising while "
        "eval/scores, a gold reward or the samples get worse: the reward is exploited; stop earlier, raise kl_coef.",
    ),
    (
        "objective/scores_std",
        "Standard deviation of these scores in the batch.",
        "Clearly above 0.",
        "At 0 there is nothing to learn (alarm reward_std): a constant reward, or responses that are all the same.",
    ),
    (
        "objective/rlhf_reward",
        "What is optimised: objective/scores plus objective/non_score_reward.",
        "Rises, less than the score.",
        "Falling while the score rises: the KL penalty outweighs the gain; lower kl_coef or the learning rate.",
    ),
    (
        "objective/non_score_reward",
        "The KL penalty as it enters the reward: minus kl_coef (beta) times objective/kl.",
        "Negative, a fraction of the score's gain.",
        "See objective/kl.",
    ),
    ("reward", "Mean score as the rewards gave it, before penalty, clipping and KL.", "Rises.", "As objective/scores."),
    ("reward_std", "Standard deviation of these scores.", "Clearly above 0.", "As objective/scores_std."),
    (
        "frac_reward_zero_std",
        "RLOO: share of the groups in which all scores are equal, and which teach nothing.",
        "Below a half.",
        "Near 1: a finer reward, a higher temperature, more num_generations, or harder prompts.",
    ),
    (
        "rewards/*/mean",
        "Mean of one reward by itself, as it gave it.",
        "The one that matters rises.",
        "One falls while another rises: they disagree; see reward_weights.",
    ),
    (
        "rewards/*/std",
        "Standard deviation of one reward by itself.",
        "Above 0.",
        "0: this reward tells no responses apart.",
    ),
    (
        "rewards/dropped",
        "Responses left out because a reward failed (reward_failure=drop).",
        "0.",
        "Mend the function or the server; many dropped rows bias the batch.",
    ),
)
KL: Rows = (
    (
        "objective/kl",
        "KL of the policy to the reference: mean over responses of the sum over tokens, nats.",
        "Starts at 0 and rises slowly to between 1 and some tens.",
        "Racing up: lower learning_rate, raise kl_coef, or use "
        "kl_target. Far below 0: what is learned from is not what was sampled (alarm kl_below).",
    ),
    ("kl", "RLOO: the same as a mean over tokens.", "As objective/kl, divided by the length.", "As objective/kl."),
    (
        "objective/kl_coef",
        "Weight of the KL in the reward; moves with kl_target.",
        "Constant, or settling.",
        "Swinging: a longer kl_horizon.",
    ),
    (
        "objective/entropy",
        "Mean over responses of the sum of -log probability of the sampled tokens, nats: a surprise, not an entropy.",
        "Falls slowly.",
        "To 0 within a few updates: the policy has collapsed to one answer; see policy/entropy_avg.",
    ),
    (
        "policy/entropy_avg entropy",
        "Entropy of the next-token distribution, mean over response tokens, nats.",
        "Falls slowly, stays well above 0.",
        "Collapsing: lower learning_rate, raise kl_coef or the temperature. Rising far "
        "above its start: the policy is dissolving; lower learning_rate.",
    ),
)
LENGTH: Rows = (
    (
        "val/response_length completions/mean_length",
        "Mean length of the responses in tokens, the stop token included.",
        "Moves, but not by a factor, unless length is what you reward.",
        "Growing with the reward: the reward likes length; "
        "look at length against reward, penalise length, retrain the reward model. At response_length: see "
        "completions/clipped_ratio.",
    ),
    (
        "completions/min_length completions/max_length",
        "Shortest and longest response, tokens.",
        "Above 1, and the longest at response_length now and then.",
        "Shortest at 1: some answers are empty; a reward may favour them.",
    ),
    (
        "completions/clipped_ratio",
        "Share of the responses that were cut at response_length, without an end of their own.",
        "Small, and not growing.",
        "Growing: missing_eos_penalty, a larger response_length, or a reward model that knows eos.",
    ),
    (
        "eos_rate",
        "Share of the responses that end by themselves, which a report draws: 1 - completions/clipped_ratio.",
        "Near 1, not falling.",
        "As completions/clipped_ratio.",
    ),
    (
        "completions/mean_terminated_length completions/min_terminated_length completions/max_terminated_length",
        "Lengths of the responses that ended by themselves; 0 where none did.",
        "As the mean length.",
        "As the mean length.",
    ),
    (
        "val/num_eos_tokens",
        "Responses of the batch that ended by themselves (metrics=trl: eos ids, fill included).",
        "Most of the batch.",
        "Falling: as completions/clipped_ratio.",
    ),
)
POLICY: Rows = (
    (
        "loss/policy_avg",
        "The clipped policy loss, mean over the update's optimizer steps.",
        "Near 0, noisy: it does not fall as a supervised loss does.",
        "Only its size is a sign: many times its usual one means a batch with extreme advantages.",
    ),
    (
        "policy/approxkl_avg",
        "How far the update moved the policy from the one that sampled, ½·(log ratio)², nats "
        "(PPO: a token; RLOO: a response).",
        "PPO 1e-4 to 0.02.",
        "Above: fewer epochs, lower learning_rate, or target_kl. Below 1e-6: nothing is learned.",
    ),
    (
        "policy/first_approxkl",
        "The same at the first optimizer step, before anything was learned.",
        "Rounding: below 1e-9 in float32.",
        "As val/first_ratio_error.",
    ),
    (
        "policy/clipfrac_avg",
        "Share of the tokens (RLOO: responses) at which the clip cut the policy's gradient off.",
        "0 to 0.2.",
        "Above 0.3: lower learning_rate or fewer epochs.",
    ),
    (
        "policy/steps_done",
        "With target_kl: share of the update's optimizer steps that were taken.",
        "Near 1.",
        "Low: the learning rate is too high for this target_kl, and computed steps are thrown away.",
    ),
    (
        "val/ratio",
        "Mean ratio of new to old probability over response tokens.",
        "0.9 to 1.1.",
        "Drifting away: as policy/approxkl_avg.",
    ),
    ("val/ratio_var", "Variance of that mean over the optimizer steps of the update.", "Below 0.01.", "As val/ratio."),
    (
        "val/ratio_error",
        "RLOO: largest |ratio - 1| of a token in an optimizer step, mean over the steps.",
        "Grows with the steps of an update.",
        "Very large: as policy/approxkl_avg.",
    ),
    (
        "val/first_ratio_error",
        "Largest |ratio - 1| of a token at the first optimizer step, before anything was learned.",
        "Rounding: 1e-6 in float32, up to 0.5 in bfloat16.",
        "Above (alarm first_ratio): what is learned from is not what "
        "was sampled: options of sampling with old_logprobs=sampler, dropout, or a fault.",
    ),
    (
        "clip_ratio/low_mean clip_ratio/high_mean clip_ratio/region_mean",
        "RLOO: share of the actions clipped below, above, and either.",
        "0 to 0.2.",
        "As policy/clipfrac_avg.",
    ),
    (
        "clip_ratio/low_min clip_ratio/high_max",
        "RLOO: least and largest clipping among the actions of a minibatch.",
        "0; and 1 where anything is clipped.",
        "As policy/clipfrac_avg.",
    ),
)
CRITIC: Rows = (
    (
        "loss/value_avg",
        "PPO: the clipped value loss (the ½ in it, vf_coef not).",
        "Falls, then follows the rewards.",
        "Rising without end: lower learning_rate, whiten_rewards, or start the critic from the reward model.",
    ),
    (
        "val/explained_variance",
        "PPO: 1 - Var[returns - values] / Var[returns]: what the critic foresaw.",
        "Rises from below 0 towards 0.3 to 0.9.",
        "Below 0 for long: the critic hurts more than it helps; more vf_coef, more "
        "epochs, a better start (value_model_path), or RLOO, which has none.",
    ),
    (
        "val/clipfrac_avg",
        "PPO: share of the values that the value clip held back (RLOO: 0).",
        "0 to 0.3.",
        "High for long: a larger cliprange_value, as rewards are larger than the clip.",
    ),
)
SUPERVISED: Rows = (
    (
        "loss",
        "SFT: cross-entropy over the learned tokens, nats a token. Reward model: -log sigmoid(margin), which is 0.693 "
        "for a coin. RLOO: the policy loss, see loss/policy_avg.",
        "SFT and reward model: falls.",
        "Flat: raise learning_rate. Jumping: lower it, or set max_grad_norm.",
    ),
    (
        "accuracy",
        "Reward model: share of the pairs that it ranks right.",
        "0.5 is chance; 0.65 to 0.8 on human judgements.",
        "1.0 in training and chance in evaluation: it memorises; fewer passes, more pairs.",
    ),
    (
        "margin",
        "Reward model: mean score of the chosen response less that of the rejected one.",
        "Above 0, rising.",
        "Huge: it is overconfident, see the calibration; fewer passes.",
    ),
    (
        "mean_reward",
        "Reward model: mean score of both responses of the pairs.",
        "Stays near 0.",
        "Drifting: center_rewards_coefficient, or normalize_dataset_name.",
    ),
    (
        "min_reward max_reward",
        "Reward model: least and greatest score.",
        "A few units apart.",
        "Outliers of many deviations: look at those texts; a policy will find them.",
    ),
    (
        "eval/loss",
        "SFT: validation loss, nats a token. Reward model: pairwise loss on held-out pairs.",
        "Falls, and stays near the training loss.",
        "Rising while the training loss falls: overfitting; stop at its least (metric_for_best_model).",
    ),
    ("eval/perplexity", "exp of the validation loss.", "Falls.", "As eval/loss."),
    (
        "eval/calibration_error",
        "Reward model: how far its confidence, sigmoid(|margin|), is from the share of the pairs that it ranks right, "
        "mean over ten parts of the pairs from the least sure to the surest.",
        "Below 0.1.",
        "Above: overconfident (see the report's diagram); fewer passes, a lower learning_rate, more pairs.",
    ),
    (
        "eval/accuracy",
        "Share of held-out pairs that the reward model ranks right.",
        "0.65 to 0.8 on human judgements.",
        "Chance: more pairs, a larger model, or labels that nobody could learn.",
    ),
)
EVALUATION: Rows = (
    (
        "eval/scores",
        "Mean score on the first evaluation set, at the training temperature.",
        "Rises with the training score.",
        "Behind it: the policy learns the training prompts by heart, or drifts from what it saw.",
    ),
    ("eval/scores_se", "Standard error of eval/scores.", "Small against the gain.", "Larger max_eval_samples."),
    ("eval/kl", "objective/kl on the first evaluation set, nats a response.", "As objective/kl.", "As objective/kl."),
    ("eval/response_length", "Mean length on the first evaluation set, tokens.", "As in training.", "As in training."),
    (
        "eval/eos_rate",
        "Share of its responses that end by themselves.",
        "Near 1, not falling.",
        "As completions/clipped_ratio.",
    ),
)
CLOCK: Rows = (
    (
        "lr learning_rate",
        "Learning rate of the update (RLOO: of its first optimizer step).",
        "As the schedule says.",
        "See lr_scheduler_type, warmup_steps.",
    ),
    (
        "grad_norm",
        "Norm of the gradient before clipping, mean over the update's optimizer steps.",
        "Steady within a factor of ten.",
        "Spikes: set max_grad_norm; look at the samples of that update.",
    ),
    ("step", "Updates done.", "", ""),
    ("episode", "Responses (SFT: texts; reward model: pairs) learned from so far.", "", ""),
    ("epoch", "Passes over the training data so far.", "Below 1 or 2 for a reward model, up to 4 for a policy.", ""),
    ("num_tokens", "Tokens of prompts and responses seen so far.", "", ""),
)
BAD: Rows = (
    (
        "nonfinite/score nonfinite/logprob nonfinite/value nonfinite/advantage nonfinite/return nonfinite/loss "
        "nonfinite/gradient nonfinite/optimizer",
        "1 where this was not a finite number in the update, of which nothing, or "
        "only the steps before it, has reached the params.",
        "Absent.",
        "Look at nonfinite/STEP.jsonl; lower learning_rate, set max_grad_norm, mend rewards or data.",
    ),
    ("nonfinite/updates", "Updates so far in which something was not finite.", "Absent.", "As above."),
    ("nonfinite/in_a_row", "How many of them in a row; max_nonfinite ends the run.", "Absent or 0.", "As above."),
    (
        "nonfinite/steps_applied",
        "Optimizer steps of the bad update that were taken before it went bad.",
        "Absent.",
        "As above.",
    ),
    ("alarm/kl_below", "1 while objective/kl is below -alarm_kl_below.", "Absent.", "See objective/kl."),
    ("alarm/kl_above", "1 while objective/kl is above alarm_kl_above.", "Absent.", "See objective/kl."),
    (
        "alarm/first_ratio",
        "1 while val/first_ratio_error is above its threshold.",
        "Absent.",
        "See val/first_ratio_error.",
    ),
    (
        "alarm/reward_std",
        "1 while all scores of the batch (RLOO: of each group) are equal.",
        "Absent.",
        "See objective/scores_std.",
    ),
    (
        "alarm/eos_share",
        "1 while far fewer responses end by themselves than at the start.",
        "Absent.",
        "See completions/clipped_ratio.",
    ),
    (
        "alarm/length_growth",
        "1 while responses are far longer than at the start.",
        "Absent.",
        "See val/response_length.",
    ),
    (
        "alarm/length_collapse",
        "1 while responses are far shorter than at the start.",
        "Absent.",
        "See val/response_length; saying nothing may pay: missing_eos_penalty, or a reward that likes short texts.",
    ),
)
TIME: Rows = (
    (
        "time/step",
        "Seconds from the last update's metrics to this one's, evaluation, samples and checkpoints included.",
        "Steady.",
        "Spikes are evaluations and checkpoints: fewer of them.",
    ),
    ("step_time", "Seconds of the update alone.", "Steady; the first compiles.", "See the phases."),
    (
        "time/generate",
        "Seconds of sampling the responses.",
        "A third to a half of an update.",
        "Most of it: a smaller response_length, length_buckets, a larger rollout_batch_size.",
    ),
    ("time/score", "Seconds of scoring them.", "Small.", "A slow Python function or server: make it async, batch it."),
    ("time/experience", "Seconds of log-probabilities, values and advantages.", "Small.", "A larger micro_batch_size."),
    (
        "time/update",
        "Seconds of all optimizer steps.",
        "A half of an update.",
        "Fewer epochs, a larger micro_batch_size, bfloat16.",
    ),
    ("time/reward/*", "Seconds of one reward (`device`: all that are computed there).", "Small.", "As time/score."),
    (
        "time/compile",
        "Seconds of compiling in this update.",
        "0 after the first updates.",
        "Again and again: batches change shape; see length_buckets.",
    ),
    (
        "time/save",
        "Seconds that the run waited for checkpoints before this update; the rest of their writing goes on beside it.",
        "0 but after a save.",
        "Many: a larger save_steps, a faster disk.",
    ),
    ("eps", "Episodes a second since this process began, everything included.", "Steady.", ""),
    ("wall_time", "When the line was written, seconds since 1970.", "", ""),
    (
        "memory/peak_rss_mib",
        "Most memory of the first process so far, MiB.",
        "Level after the first updates.",
        "Growing without end: a leak, often in a reward function.",
    ),
    (
        "memory/peak_device_mib",
        "Most memory of its fullest device so far, MiB, where the device tells.",
        "Below 90 % of the device.",
        "A smaller micro_batch_size, gradient_checkpointing, a mesh, offload_frozen.",
    ),
)

SECTIONS: tuple[tuple[str, str, Rows], ...] = (
    ("Reward", "", REWARD),
    ("KL and entropy", "", KL),
    ("Length and endings", "", LENGTH),
    ("Policy", "", POLICY),
    ("Critic", "", CRITIC),
    ("SFT and reward models", "", SUPERVISED),
    ("Evaluation of a policy", "Beside the twins of all metrics of training.", EVALUATION),
    ("Clock and gradient", "", CLOCK),
    ("Alarms and numbers that are not finite", "Only where it happens.", BAD),
    ("Time and memory", "In timings.jsonl, which differs from run to run.", TIME),
)
