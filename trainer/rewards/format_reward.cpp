// format: 1 when the response has the wanted shape, else 0. RE2: linear time whatever pattern and text.
#include <re2/re2.h>

#include "base/error.h"
#include "trainer/rewards/reward_types.h"

namespace trireme {
namespace {

class FormatReward final : public Reward {
 public:
  explicit FormatReward(const RewardOptions& options)
      : name_(options.name.empty() ? options.type : options.name), tags_(options.tags) {
    if (options.pattern.empty() && tags_.empty()) fail_user("reward '" + name_ + "': give a pattern or tags");
    for (const std::string& tag : tags_) {
      if (tag.empty() || tag.find_first_of("<>/ \n") != std::string::npos)
        fail_user("reward '" + name_ + "': tag '" + tag + "' must be a bare name such as think");
    }
    if (!options.pattern.empty()) {
      RE2::Options re2;
      re2.set_log_errors(false);
      re2.set_dot_nl(true);  // a response has lines; '.' shall not stop at them
      pattern_ = std::make_unique<RE2>(options.pattern, re2);
      if (!pattern_->ok())
        fail_user("reward '" + name_ + "': pattern '" + options.pattern +
                  "' is not a regular expression of RE2: " + pattern_->error());
    }
  }
  const std::string& name() const override { return name_; }

  std::vector<RewardResult> score(const std::vector<RewardRequest>& requests, const Deadline&) override {
    std::vector<RewardResult> results;
    results.reserve(requests.size());
    for (const RewardRequest& request : requests) {
      const bool good = has_tags(request.response) && (!pattern_ || RE2::PartialMatch(request.response, *pattern_));
      results.push_back({.reward = good ? 1.0 : 0.0});
    }
    return results;
  }

 private:
  bool has_tags(const std::string& text) const {
    size_t from = 0;
    for (const std::string& tag : tags_) {
      const std::string open = "<" + tag + ">", close = "</" + tag + ">";
      const size_t start = text.find(open);
      const size_t end = start == std::string::npos ? start : text.find(close, start + open.size());
      if (start == std::string::npos || start < from || end == std::string::npos) return false;
      if (text.find(open, start + 1) != std::string::npos || text.find(close) != end ||
          text.find(close, end + 1) != std::string::npos)
        return false;
      from = end + close.size();
    }
    return true;
  }

  std::string name_;
  std::vector<std::string> tags_;
  std::unique_ptr<RE2> pattern_;
};

}  // namespace

std::unique_ptr<Reward> make_format_reward(const RewardOptions& options) {
  return std::make_unique<FormatReward>(options);
}

}  // namespace trireme
