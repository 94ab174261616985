#include "trainer/rollout/driver.h"

#include <map>
#include <utility>

#include "base/error.h"

namespace trireme {
namespace {

class DrivenEngine final : public RunEngine {
 public:
  DrivenEngine(Engine& engine, const DriverHooks& hooks) : engine_(engine), hooks_(hooks) {
    if (!hooks.finished) return;
    engine_.on_sample = [this](const GroupRequest& request, int64_t index, const GeneratedSample& generated) {
      const SampleRun& run = runs_.at(request.first_sample_id);
      hooks_.finished({run, run.first_sample + index, request, generated});
    };
  }
  ~DrivenEngine() override { engine_.on_sample = nullptr; }
  DrivenEngine(const DrivenEngine&) = delete;
  DrivenEngine& operator=(const DrivenEngine&) = delete;

  int64_t unfinished() const override { return engine_.unfinished_samples(); }
  bool crowded() const override { return engine_.crowded(); }

  void submit(const SampleRun& run) override {
    GroupRequest request = hooks_.request(run);
    request.group_id = run.group;
    request.samples = run.count;
    const uint64_t first = request.first_sample_id;
    TRIREME_CHECK(runs_.emplace(first, run).second, "two runs of a rollout have the same sample ids");
    try {
      engine_.submit(std::move(request));
    } catch (const Error& error) {
      if (!hooks_.origin) throw;
      throw Error(error.kind(), hooks_.origin(run) + error.what());
    }
  }

  void step() override {
    for (GeneratedGroup& group : engine_.step()) {
      const auto found = runs_.find(group.first_sample_id);
      TRIREME_CHECK(found != runs_.end(), "the engine has finished a run that nobody submitted");
      const SampleRun run = found->second;
      runs_.erase(found);
      if (hooks_.complete) hooks_.complete(run, std::move(group));
    }
    if (hooks_.between_steps) hooks_.between_steps();
  }

 private:
  Engine& engine_;
  const DriverHooks& hooks_;
  std::map<uint64_t, SampleRun> runs_;  // unfinished ones, by their first sample's id
};

}  // namespace

void drive_rollout(Engine& engine, RunSource& source, const DriverHooks& hooks) {
  TRIREME_CHECK(engine.idle(), "a rollout was begun on an engine that is not idle");
  DrivenEngine driven(engine, hooks);
  while (take_and_step(driven, source)) {
  }
}

}  // namespace trireme
