// Advantages and everything between a raw reward and the number the loss multiplies. Pure, in double.
#pragma once

#include <cstdint>
#include <vector>

#include "trainer/options/advantages.h"
#include "trainer/options/loss.h"

namespace trireme {

// Clamp to [source_min, source_max], then the affine map onto [target_min, target_max].
double scale_reward(double reward, const RewardScaling& scaling);

// DAPO's overlong shaping (Yu et al. 2025, equation 13, not floored as in NeMo-RL), or the stop-properly rule.
double shape_reward(double reward, int64_t response_length, bool truncated, const RewardShaping& shaping);

// One group of n responses to one prompt -> n advantages. Groups whose rewards are all equal give zeros.
// GRPO: b_i = mean of the others, std_i of the others (leave one out), A_i = (r_i - b_i) / (std_i + 1e-6) where std_i >
// 0.
std::vector<double> group_advantages(const std::vector<double>& rewards, const AdvantageOptions& options);

// True when every reward of the group is the same number (decided on the rewards, not on a rounded std).
bool all_equal(const std::vector<double>& rewards);

// Reinforce++: whitens the advantages of tokens over the whole batch: (A - mean) * rsqrt(max(variance, 1e-8)), biased
// variance. tokens[i]: how many valid tokens have advantages[i]; without any all become 0.
std::vector<double> whiten(std::vector<double> advantages, const std::vector<double>& tokens);

double clip_advantage(double advantage, const AdvantageOptions& options);

// ---- PPO: of one response, token by token. `mask`: 0 where a token is not in the loss -------------------------------

// Estimate of the KL of the policy to the reference at a token (Schulman 2020), clamped as NeMo-RL clamps a KL that is
// taken off rewards whatever the configuration says: the log-ratio to +-20, the estimate to +-10.
double token_kl(double logprob, double reference, KlEstimator estimator);

// `reward` at the last token of the mask, less `penalty` times the KL (empty: none) of each; 0 where masked.
std::vector<double> token_rewards(double reward, const std::vector<uint8_t>& mask, const std::vector<double>& kl = {},
                                  double penalty = 0);

// Lambda of the advantages of a response with so many valid tokens: the length-adaptive one (VAPO, Yue et al. 2025,
// arXiv 2504.05118), else gae_lambda_policy, else gae_lambda.
double policy_lambda(int64_t valid_tokens, const GaeOptions& options);

// Generalized advantage estimation (Schulman et al. 2015, arXiv 1506.02438). values[t]: of the state before token t;
// behind the last one it is 0. Masked tokens are skipped, they are no step in time; both numbers of theirs are 0.
struct TokenAdvantages {
  std::vector<double> advantages;  // with policy_lambda, not whitened
  std::vector<double> returns;     // advantages with gae_lambda_value, plus values
};
TokenAdvantages generalized_advantages(const std::vector<double>& rewards, const std::vector<float>& values,
                                       const std::vector<uint8_t>& mask, const GaeOptions& options);

// (A - mean) / sqrt(variance + 1e-8) of all valid tokens of a batch, unbiased variance. One token alone becomes 0.
void whiten_unbiased(std::vector<double>& advantages);

}  // namespace trireme
