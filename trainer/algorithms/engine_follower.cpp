#include "trainer/algorithms/engine_follower.h"

#include <ATen/Parallel.h>

#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "trainer/algorithms/engine_layout.h"
#include "trainer/parallel/device.h"

namespace trireme {
namespace {

constexpr Milliseconds kComesTo{60000};  // turns, to what the leader has done already

class EngineFollower final {
 public:
  explicit EngineFollower(EngineRank& rank) : rank_(rank), group_(rank.group()) {}
  ~EngineFollower() { end(); }

  void run() {
    const EngineMessage begin = group_.next_turn();
    if (begin.kind == EngineMessage::kEnd) return over(begin);
    rank_.make_receiver(begin.number, {});
    engine_ = rank_.make_engine(at::get_num_threads());
    if (rank_.options().on_ready) rank_.options().on_ready();
    thread_ = std::thread([this] { follow_orders(); });
    try {
      for (;;) {
        const EngineMessage turn = group_.next_turn();
        if (turn.kind == EngineMessage::kEnd) return over(turn);
        take(turn);
      }
    } catch (const Error&) {
      end();
      if (failure_) std::rethrow_exception(failure_);  // of the orders, which has ended the turns
      throw;
    }
  }

 private:
  static void over(const EngineMessage& turn) {
    if (!turn.text.empty())
      throw Error(ErrorKind::kUnavailable, "the first rank of this engine has failed: " + turn.text);
  }

  void take(const EngineMessage& turn) {
    switch (turn.kind) {
      case EngineMessage::kSubmit:
        submit_to(*engine_, unpack_request(turn.text));
        break;
      case EngineMessage::kStep:
        (void)step_of(*engine_);
        break;
      case EngineMessage::kStill:
        synchronize(rank_.model().options().device);
        group_.answer_turn({.kind = EngineMessage::kDone, .text = {}});
        break;
      case EngineMessage::kWeights:
        see_other_thread();
        rank_.receiver()->apply();
        engine_->weights_changed(turn.number, static_cast<KeptCache>(turn.flag));
        came_to(turn.number);
        break;
      default:
        throw Error(ErrorKind::kInternal, "an engine's leader says what no turn is");
    }
  }

  // What one thread has received is there for the other, which takes it: each call behind the other's sees its writes.
  void see_other_thread() { const std::lock_guard lock(mutex_); }

  void came_to(int64_t version) {
    {
      const std::lock_guard lock(mutex_);
      version_ = version;
    }
    changed_.notify_all();
  }

  // Behind the turn that has taken what was received before: until then its copy is not overwritten.
  void wait_until_at(int64_t version) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, kComesTo, [&] { return ending_ || version_ >= version; }))
      fail_timeout("this rank of the engine did not come to the leader's weights in time");
  }

  // The work of a thread of its own.
  void follow_orders() {
    try {
      rank_.use_device();
      for (;;) {
        const EngineMessage order = group_.next_order();
        if (order.kind == EngineMessage::kEnd) return;  // a turn says so too
        if (order.kind != EngineMessage::kAlive) group_.answer_order(answer(order));
      }
    } catch (...) {
      {
        const std::lock_guard lock(mutex_);
        if (!ending_) failure_ = std::current_exception();
      }
      group_.cancel_turns();
    }
  }

  EngineMessage answer(const EngineMessage& order) {
    try {
      return {.kind = carry_out(order), .text = {}};
    } catch (const Error& error) {
      return {.kind = EngineMessage::kFailed, .number = static_cast<int64_t>(error.kind()), .text = error.what()};
    }
  }

  EngineMessage::Kind carry_out(const EngineMessage& order) {
    switch (order.kind) {
      case EngineMessage::kPin:
        return pin(order) ? EngineMessage::kDone : EngineMessage::kGone;
      case EngineMessage::kReceive:
        rank_.receiver()->receive_pinned();
        see_other_thread();
        return EngineMessage::kDone;
      case EngineMessage::kRelease:
        rank_.receiver()->release();
        return EngineMessage::kDone;
      default:
        throw Error(ErrorKind::kInternal, "an engine's leader says what no order is");
    }
  }

  bool pin(const EngineMessage& order) {
    wait_until_at(order.behind);
    const std::string link = link_of_rank(order.text, group_.rank());
    return rank_.receiver()->pin(link, rank_.parts(order.flag), order.number) >= 0;
  }

  void end() {
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    changed_.notify_all();
    group_.cancel_turns();
    group_.cancel_orders();
    if (rank_.receiver() != nullptr) rank_.receiver()->cancel();
    if (thread_.joinable()) thread_.join();
  }

  EngineRank& rank_;
  EngineGroup& group_;
  std::unique_ptr<Engine> engine_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t version_ = -1;
  bool ending_ = false;
  std::exception_ptr failure_;
  std::thread thread_;
};

}  // namespace

void follow_leader(EngineRank& rank) { EngineFollower(rank).run(); }

}  // namespace trireme
