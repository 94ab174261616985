#include "trainer/rollout/driver.h"

#include <map>
#include <utility>

#include "base/error.h"

namespace trireme {
namespace {

class DrivenEngine final : public QueueEngine {
 public:
  DrivenEngine(Engine& engine, const DriverHooks& hooks) : engine_(engine), hooks_(hooks) {
    if (!hooks.finished) return;
    engine_.on_sample = [this](const GroupRequest& request, int64_t index, const GeneratedSample& generated) {
      const SampleSpan& span = spans_.at(request.first_sample_id);
      hooks_.finished({span, span.first_sample + index, request, generated});
    };
  }
  ~DrivenEngine() override { engine_.on_sample = nullptr; }
  DrivenEngine(const DrivenEngine&) = delete;
  DrivenEngine& operator=(const DrivenEngine&) = delete;

  int64_t unfinished() const override { return engine_.unfinished_samples(); }
  bool crowded() const override { return engine_.crowded(); }
  bool somebody_unfinished() override { return engine_.somebody_unfinished(); }

  void submit(const SampleSpan& span) override {
    GroupRequest request = hooks_.request(span);
    request.group_id = span.group;
    request.samples = span.count;
    const uint64_t first = request.first_sample_id;
    TRIREME_CHECK(spans_.emplace(first, span).second, "two spans of a rollout have the same sample ids");
    try {
      engine_.submit(std::move(request));
    } catch (const Error& error) {
      if (!hooks_.origin) throw;
      throw Error(error.kind(), hooks_.origin(span) + error.what());
    }
  }

  void step() override {
    for (GeneratedGroup& group : engine_.step()) {
      const auto found = spans_.find(group.first_sample_id);
      TRIREME_CHECK(found != spans_.end(), "the engine has finished a span that nobody submitted");
      const SampleSpan span = found->second;
      spans_.erase(found);
      if (hooks_.complete) hooks_.complete(span, std::move(group));
    }
    if (hooks_.between_steps) hooks_.between_steps();
  }

 private:
  Engine& engine_;
  const DriverHooks& hooks_;
  std::map<uint64_t, SampleSpan> spans_;  // unfinished ones, by their first sample's id
};

}  // namespace

void drive_rollout(Engine& engine, SampleSource& source, const DriverHooks& hooks) {
  TRIREME_CHECK(engine.idle(), "a rollout was begun on an engine that is not idle");
  engine.take_cache();
  DrivenEngine driven(engine, hooks);
  while (take_and_step(driven, source)) {
  }
}

}  // namespace trireme
