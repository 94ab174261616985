#include "trainer/algorithms/engine_group.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <exception>
#include <nlohmann/json.hpp>
#include <utility>

#include "trainer/parallel/sockets.h"

namespace trireme {
namespace {

constexpr const char* kHost = "127.0.0.1";  // ranks of an engine share a machine
constexpr int64_t kLongestText = int64_t{64} << 20;
// Between orders: longer than an engine may take to a step's end, or a transfer with its repeats.
constexpr Milliseconds kOrders{600000};
// For an answer: the turns ahead of it, and a transfer.
constexpr Milliseconds kAnswer{180000};
// A turn comes when there is work; whether its sender is there, the line of orders sees.
constexpr Milliseconds kTurns{std::chrono::hours(24 * 365)};

at::Tensor bytes_of(void* data, int64_t size) { return at::from_blob(data, {size}, at::kByte); }

// The numbers, then the text's size.
void send(LinkPair& line, const EngineMessage& message, const Deadline& deadline) {
  int64_t head[] = {message.kind, message.number, message.flag, message.behind,
                    static_cast<int64_t>(message.text.size())};
  line.send(bytes_of(head, sizeof head), deadline);
  if (message.text.empty()) return;
  std::string text = message.text;
  line.send(bytes_of(text.data(), head[4]), deadline);
}

EngineMessage receive(LinkPair& line, const Deadline& deadline) {
  int64_t head[5] = {};
  line.receive(bytes_of(head, sizeof head), deadline);
  EngineMessage message{.kind = head[0], .number = head[1], .flag = head[2], .behind = head[3], .text = {}};
  if (head[4] < 0 || head[4] > kLongestText) throw Error(ErrorKind::kUnavailable, "a message is too long");
  message.text.resize(static_cast<size_t>(head[4]));
  if (head[4] > 0) line.receive(bytes_of(message.text.data(), head[4]), deadline);
  return message;
}

std::string leader_key(const EngineGroupOptions& options) {
  return "engine-ranks/" + options.name + "/" + options.start;
}

RendezvousOptions rendezvous_of(const EngineGroupOptions& options, int port) {
  RendezvousOptions own = options.job;
  own.rank = options.rank;
  own.world_size = own.local_world = static_cast<int>(options.layout.world());
  own.master_address = kHost;
  own.master_port = port;
  own.launcher_fd = own.listen_fd = -1;
  own.actor_ranks = own.critic_ranks = 0;
  own.of_critic = false;
  return own;
}

}  // namespace

std::string pack_request(const GroupRequest& request) {
  TRIREME_CHECK(!request.sampling, "requests of an engine's ranks have the run's own sampling");
  const nlohmann::json json = {{"group", request.group_id},       {"prompt", request.prompt},
                               {"samples", request.samples},      {"first", request.first_sample_id},
                               {"most", request.max_new_tokens},  {"lengths", request.forced_lengths},
                               {"ends_known", request.ends_known}};
  const std::vector<uint8_t> bytes = nlohmann::json::to_cbor(json);
  return {bytes.begin(), bytes.end()};
}

GroupRequest unpack_request(const std::string& bytes) {
  try {
    const nlohmann::json json = nlohmann::json::from_cbor(bytes);
    GroupRequest request;
    request.group_id = json.at("group").get<int64_t>();
    request.prompt = json.at("prompt").get<std::vector<int32_t>>();
    request.samples = json.at("samples").get<int64_t>();
    request.first_sample_id = json.at("first").get<uint64_t>();
    request.max_new_tokens = json.at("most").get<int64_t>();
    request.forced_lengths = json.at("lengths").get<std::vector<int64_t>>();
    request.ends_known = json.at("ends_known").get<bool>();
    return request;
  } catch (const nlohmann::json::exception& error) {
    throw Error(ErrorKind::kData, std::string("an engine's leader sends a request that is none: ") + error.what());
  }
}

EngineGroup::EngineGroup(const EngineGroupOptions& options) {
  if (options.layout.world() == 1)
    context_ = std::make_unique<ParallelContext>();
  else
    meet(options);
}

EngineGroup::~EngineGroup() = default;

// The leader's port is the kernel's choice, and the job's store says which until all have come.
void EngineGroup::meet(const EngineGroupOptions& options) {
  const Milliseconds timeout = options.job.timeout;
  const Deadline deadline = Deadline::after(timeout);
  RendezvousOptions own = rendezvous_of(options, 0);
  LinkStore job(options.job.master_address, options.job.master_port, options.job.attempt, timeout);
  if (options.rank == 0) {
    uint16_t port = 0;
    own.listen_fd = listen_anywhere(port, "the ranks of engine " + options.name);
    own.master_port = port;
    job.set(leader_key(options), std::to_string(port));
  } else {
    own.master_port = std::stoi(job.get(leader_key(options), deadline, cancel_turns_,
                                        "the first rank of engine " + options.name + " did not come"));
  }
  context_ = std::make_unique<ParallelContext>(options.layout, own);
  if (leads()) job.erase(leader_key(options));
  LinkStore store(kHost, own.master_port, own.attempt, timeout);
  for (int follower = 1; follower < size(); ++follower) {
    if (!leads() && follower != rank()) continue;
    const int side = leads() ? 0 : 1;
    const std::string peer = "rank " + std::to_string(leads() ? follower : 0) + " of engine " + options.name;
    const auto line = [&](const std::string& what, LinkCancel& cancel) {
      return std::make_unique<LinkPair>(store, what + std::to_string(follower), side, kHost, peer, deadline, cancel);
    };
    Lines lines;
    lines.turns = line("engine-turns-", cancel_turns_);
    lines.orders = line("engine-orders-", cancel_orders_);
    lines_.push_back(std::move(lines));
  }
}

Deadline EngineGroup::patience() const { return Deadline::after(context_->timeout()); }

void EngineGroup::tell(const EngineMessage& turn) {
  for (Lines& line : lines_) send(*line.turns, turn, patience());
}

void EngineGroup::submit(const GroupRequest& request) {
  if (!lines_.empty()) tell({.kind = EngineMessage::kSubmit, .text = pack_request(request)});
}

void EngineGroup::step() { tell({.kind = EngineMessage::kStep, .text = {}}); }

void EngineGroup::be_still() {
  tell({.kind = EngineMessage::kStill, .text = {}});
  for (Lines& line : lines_) (void)receive(*line.turns, patience());
}

// An answer that is missing here would be taken for the next order's.
void EngineGroup::send_order(const EngineMessage& order) {
  if (!carries_orders_)
    throw Error(ErrorKind::kUnavailable, "an order about weights has failed before, so nothing more is asked for");
  carries_orders_ = false;
  for (Lines& line : lines_) send(*line.orders, order, Deadline::after(kAnswer));
  carries_orders_ = true;
}

std::vector<EngineMessage> EngineGroup::answers() {
  carries_orders_ = false;
  std::vector<EngineMessage> all;
  for (Lines& line : lines_) all.push_back(receive(*line.orders, Deadline::after(kAnswer)));
  carries_orders_ = true;
  return all;
}

bool EngineGroup::order(const EngineMessage& order, const std::function<void()>& meanwhile) {
  const std::lock_guard lock(orders_);
  std::exception_ptr unsent;
  try {
    send_order(order);
  } catch (...) {
    unsent = std::current_exception();
  }
  std::exception_ptr own;
  try {
    if (meanwhile) meanwhile();
  } catch (...) {
    own = std::current_exception();
  }
  if (unsent) std::rethrow_exception(unsent);
  const std::vector<EngineMessage> said = answers();
  if (own) std::rethrow_exception(own);
  for (const EngineMessage& answer : said) {
    if (answer.kind == EngineMessage::kFailed) throw Error(static_cast<ErrorKind>(answer.number), answer.text);
  }
  return std::none_of(said.begin(), said.end(),
                      [](const EngineMessage& answer) { return answer.kind == EngineMessage::kGone; });
}

void EngineGroup::give_sign_of_life() {
  const std::lock_guard lock(orders_);
  send_order({.kind = EngineMessage::kAlive, .text = {}});
}

// On both lines: who sees one of them close first would take it for the leader's death. On one that has failed nobody
// waits any more.
void EngineGroup::end(const std::string& why) {
  cancel_orders_.reset();  // whose waits have ended
  const EngineMessage message{.kind = EngineMessage::kEnd, .text = why};
  for (Lines& line : lines_) {
    for (LinkPair* pair : {line.turns.get(), line.orders.get()}) {
      try {
        send(*pair, message, patience());
      } catch (const Error&) {
        continue;
      }
    }
  }
}

EngineMessage EngineGroup::next_turn() { return receive(*lines_.front().turns, Deadline::after(kTurns)); }

EngineMessage EngineGroup::next_order() { return receive(*lines_.front().orders, Deadline::after(kOrders)); }

void EngineGroup::answer_turn(const EngineMessage& answer) { send(*lines_.front().turns, answer, patience()); }

void EngineGroup::answer_order(const EngineMessage& answer) { send(*lines_.front().orders, answer, patience()); }

}  // namespace trireme
